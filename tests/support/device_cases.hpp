// SPDX-License-Identifier: MIT
#pragma once

#include <doctest/doctest.h>
#include <fake/cuda.hpp>
#include <support/device_engine.hpp>
#include <support/failures.hpp>
#include <zero/comm/concept.hpp>
#include <zero/core/float16.hpp>
#include <zero/device/cuda.hpp>
#include <zero/optim/adamw.hpp>
#include <zero/optim/sgd.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// @file
/// Real faults of other systems that need a device with streams, as small inputs with the right
/// answer, over any communicator of the CUDA device.

namespace test {

template <class T>
using cuda_tensor = device_tensor<zero::cuda, T>;

/// out[i] = value.
template <class T>
struct fill {
  T* out;
  T value;
  void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      out[i] = value;
    }
  }
};

/// out[i] = in[i].
struct read_values {
  float const* in;
  float* out;
  void operator()(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      out[i] = in[i];
    }
  }
};

template <class T>
[[nodiscard]] std::vector<T> downloaded(zero::cuda_stream& stream, std::span<T> from) {
  std::vector<T> out(from.size());
  zero::cuda::download(stream, from, std::span{out});
  return out;
}

/// Let a stream sleep, once it comes to here.
inline void sleep_in(zero::cuda_stream& stream, std::chrono::microseconds time) {
  CHECK(fake::enqueue(stream.native(), [time] { std::this_thread::sleep_for(time); }) ==
        cudaSuccess);
}

/// A communicator whose streams sleep before each reduction, and before nothing else.
template <class Communicator>
class slow_reductions {
 public:
  using device = typename Communicator::device;
  using stream = typename device::stream;

  slow_reductions(Communicator inner, std::chrono::microseconds time)
      : inner_{std::move(inner)}, time_{time} {}

  [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_.size(); }
  void set_deadline(std::chrono::milliseconds deadline) { inner_.set_deadline(deadline); }
  void reduce_scatter(zero::const_any_span full, zero::any_span shard, zero::combine how,
                      zero::reduction what, stream& on) {
    sleep_in(on, time_);
    inner_.reduce_scatter(full, shard, how, what, on);
  }
  void all_reduce(zero::const_any_span full, zero::any_span result, zero::combine how,
                  zero::reduction what, stream& on) {
    sleep_in(on, time_);
    inner_.all_reduce(full, result, how, what, on);
  }
  void all_gather(zero::const_any_span shard, zero::any_span full, stream& on) {
    inner_.all_gather(shard, full, on);
  }
  void broadcast(zero::any_span data, int root, stream& on) { inner_.broadcast(data, root, on); }
  void barrier(stream& on) { inner_.barrier(on); }
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all) {
    inner_.exchange(mine, all);
  }
  [[nodiscard]] slow_reductions split(int color, int key) {
    return {inner_.split(color, key), time_};
  }
  void abort(std::string_view reason) noexcept { inner_.abort(reason); }

 private:
  Communicator inner_;
  std::chrono::microseconds time_;
};

// fairscale#565: a 16-bit sum overflowed before the division; pytorch#78774: dividing first
// underflowed.
template <class Communicator>
void check_16_bit_means(Communicator& comm) {
  for (zero::dtype const reduced : {zero::dtype::float16, zero::dtype::float32}) {
    for (float const gradient : {20000.0F, 0x1p-24F}) {
      zero::options const options{.clip_norm = std::numeric_limits<double>::infinity(),
                                  .precision = {zero::dtype::float16, reduced}};
      for (setting const& how : every_setting(options)) {
        zero::cuda_stream stream;
        cuda_tensor<zero::float16> p{stream, std::vector<zero::float16>(9)};
        cuda_tensor<zero::float16> p_gradient{stream, std::vector<zero::float16>(9)};
        zero::options chosen = how.options;
        chosen.stream = stream.native();
        std::vector<std::vector<zero::any_parameter>> const units{
            {zero::parameter("p", p, p_gradient)}};
        zero::sharded_model model{comm,       units, how.stage, zero::sgd{.learning_rate = 0},
                                  how.policy, chosen};
        {
          auto micro = model.microbatch(0, 1);
          auto const lease = micro.backward(0);
          zero::cuda::launch(
              stream, 9, fill<zero::float16>{p_gradient.view().data(), zero::float16{gradient}});
        }
        zero::any_span const part = model.gradient(0).elements;
        bool right = true;
        if (reduced == zero::dtype::float32) {
          for (float const actual : downloaded(stream, part.template as<float>())) {
            right = right && actual == gradient;
          }
        } else {
          for (zero::float16 const actual : downloaded(stream, part.template as<zero::float16>())) {
            right = right && static_cast<float>(actual) == gradient;
          }
        }
        CHECK_MESSAGE(right, how.name, ", gradient ", gradient);
        auto const result = model.step();
        CHECK_MESSAGE(!result.skipped(), how.name, ", gradient ", gradient);
        CHECK_MESSAGE(result.norm() == 3.0 * static_cast<double>(gradient), how.name);
      }
    }
  }
}

// DeepSpeed#5606: a bucket's buffer was filled again before its reduction had finished.
template <class Communicator>
void check_slow_reductions(Communicator& comm) {
  constexpr std::size_t units = 8;
  constexpr std::size_t size = 16;
  // Buckets of one unit, of two, of four, and one of all.
  for (std::size_t const bucket_elements : {1U, 40U, 64U, 1U << 20U}) {
    for (bool const overlap : {false, true}) {
      slow_reductions slow{comm.split(0, comm.rank()), std::chrono::milliseconds{50}};
      zero::cuda_stream stream;
      std::vector<std::unique_ptr<cuda_tensor<float>>> values;
      std::vector<std::unique_ptr<cuda_tensor<float>>> gradients;
      std::vector<std::vector<zero::any_parameter>> declared;
      for (std::size_t u = 0; u < units; ++u) {
        values.push_back(std::make_unique<cuda_tensor<float>>(stream, std::vector<float>(size)));
        gradients.push_back(std::make_unique<cuda_tensor<float>>(stream, std::vector<float>(size)));
        declared.push_back({zero::parameter("p" + std::to_string(u), *values[u], *gradients[u])});
      }
      zero::sharded_model model{slow,
                                declared,
                                zero::stage2{},
                                zero::plain_sgd{.learning_rate = 1.0},
                                zero::reduce_per_microbatch{},
                                {.bucket_bytes = bucket_elements * sizeof(float),
                                 .overlap = overlap,
                                 .stream = stream.native()}};
      {
        auto micro = model.microbatch(0, 1);
        for (std::size_t u = units; u-- > 0;) {
          auto const lease = micro.backward(u);
          zero::cuda::launch(stream, size,
                             fill<float>{gradients[u]->view().data(), static_cast<float>(u + 1)});
        }
      }
      model.step();
      model.wait();
      bool right = true;
      for (std::size_t u = 0; u < units; ++u) {
        right = right && downloaded(stream, values[u]->view()) ==
                             std::vector<float>(size, -static_cast<float>(u + 1));
      }
      CHECK_MESSAGE(right, "buckets of ", bucket_elements, " elements, overlap ", overlap);
    }
  }
}

/// Memory that is allocated where a unit was released, and filled with NaN on a stream of its own.
class nan_memory {
 public:
  void take(std::size_t elements) {
    blocks_.emplace_back();
    blocks_.back().allocate(stream_, elements);
  }
  /// Give it back, once it was written.
  void clear() {
    stream_.synchronize();
    blocks_.clear();
  }

 private:
  struct block {
    std::unique_ptr<float, void (*)(float*)> memory{
        nullptr, [](float* of) { zero::cuda::deallocate(of, 0); }};
    void allocate(zero::cuda_stream& stream, std::size_t elements) {
      memory.reset(static_cast<float*>(zero::cuda::allocate(elements * sizeof(float))));
      zero::cuda::launch(stream, elements,
                         fill<float>{memory.get(), std::numeric_limits<float>::quiet_NaN()});
    }
  };

  zero::cuda_stream stream_;
  std::vector<block> blocks_;
};

constexpr int premature_repeats = 200;

// DeepSpeed#7965: memory went back to the allocator while compute still used it.
template <class Communicator>
void check_slow_readers(Communicator& comm) {
  zero::cuda_stream stream;
  device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model model{comm,
                            engine.units(),
                            zero::stage3{.prefetch = 1},
                            zero::adamw{},
                            zero::reduce_per_microbatch{},
                            {.bucket_bytes = 0, .stream = stream.native()}};
  std::vector<std::vector<float>> const expected{
      start_values<zero::cuda, float>(0, 0, 37), start_values<zero::cuda, float>(1, 0, 64),
      start_values<zero::cuda, float>(2, 2, 130), start_values<zero::cuda, float>(3, 0, 19)};
  std::array<std::size_t, 4> const ids{model.find("0.0"), model.find("1.0"), model.find("2.2"),
                                       model.find("3.0")};
  std::vector<std::unique_ptr<cuda_tensor<float>>> copies;
  for (std::vector<float> const& each : expected) {
    copies.push_back(std::make_unique<cuda_tensor<float>>(stream, std::vector<float>(each.size())));
  }
  nan_memory poison;
  for (int repeat = 0; repeat < premature_repeats; ++repeat) {
    {
      auto evaluation = model.evaluation();
      for (std::size_t u = 0; u < 4; ++u) {
        {
          auto const lease = evaluation.forward(u);
          auto const value = lease.template parameter<float>(ids[u]);
          sleep_in(stream, std::chrono::microseconds{200});  // slow compute, fast gathers
          zero::cuda::launch(stream, value.size(),
                             read_values{value.data(), copies[u]->view().data()});
        }
        poison.take(expected[u].size());
      }
    }
    bool right = true;
    for (std::size_t u = 0; u < 4; ++u) {
      right = right && downloaded(stream, copies[u]->view()) == expected[u];
    }
    CHECK_MESSAGE(right, "repeat ", repeat);
    poison.clear();
  }
}

/// The mirror: gradients are released at once, and the slow reduction still reads them; what it
/// writes is used by the update.
template <class Communicator>
void check_slow_reducers(Communicator& comm, zero::stage at) {
  slow_reductions slow{comm.split(0, comm.rank()), std::chrono::microseconds{200}};
  zero::cuda_stream stream;
  device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model model{slow,
                            engine.units(),
                            at,
                            zero::plain_sgd{.learning_rate = 1.0},
                            zero::reduce_per_microbatch{},
                            {.bucket_bytes = 0, .stream = stream.native()}};
  nan_memory poison;
  std::vector<float> expected = engine.values(model);
  for (int repeat = 0; repeat < premature_repeats; ++repeat) {
    {
      auto micro = model.microbatch(0, 1);
      for (std::size_t u = device_units().size(); u-- > 0;) {
        std::size_t elements = 0;
        {
          auto const lease = micro.backward(u);
          for (std::size_t p = 0; p < device_units()[u].size(); ++p) {
            auto const gradient = lease.template gradient<float>(
                model.find(device_engine<zero::cuda, float>::name(u, p)));
            zero::cuda::launch(stream, gradient.size(),
                               fill<float>{gradient.data(), static_cast<float>(u + 1)});
            elements += gradient.size();
          }
        }
        poison.take(elements);
      }
    }
    model.step();
    std::size_t i = 0;
    for (std::size_t u = 0; u < device_units().size(); ++u) {
      for (std::size_t const elements : device_units()[u]) {
        for (std::size_t e = 0; e < elements; ++e) {
          expected[i++] -= static_cast<float>(u + 1);  // quarters: exact
        }
      }
    }
    CHECK_MESSAGE(engine.values(model) == expected, "stage ", at.number(), ", repeat ", repeat);
    poison.clear();
  }
}

template <class Communicator>
void check_slow_reducers(Communicator& comm) {
  check_slow_reducers(comm, zero::stage2{});  // no gather holds the engine back there
  check_slow_reducers(comm, zero::stage3{.prefetch = 1});
}

/// A model that is destroyed while its streams have work must wait for it: memory that was freed
/// faults.
template <class Communicator>
void check_destruction_in_flight(Communicator& comm) {
  for (named_stage const& each : every_stage()) {
    zero::cuda_stream stream;
    device_engine<zero::cuda, float> engine{stream};
    {
      zero::sharded_model model{comm,
                                engine.units(),
                                each.second,
                                zero::adamw{},
                                zero::reduce_per_microbatch{},
                                {.stream = stream.native()}};
      stream.synchronize();
      std::vector<std::byte> all(static_cast<std::size_t>(comm.size()));
      comm.exchange(std::array{std::byte{1}}, all);  // a rank that frees waits for the device
      sleep_in(stream, std::chrono::milliseconds{150});
      engine.step(model, {}, comm.rank(), 0);
      CHECK_MESSAGE(cudaStreamQuery(stream.native()) == cudaErrorNotReady, each.first);
    }
    CHECK_MESSAGE(cudaStreamSynchronize(stream.native()) == cudaSuccess, each.first);
  }
}

// nccl#279, #863: a rank dies, and the others wait for ever.

/// When rank 2 ends.
inline constexpr std::array<std::string_view, 5> moments{"under a forward lease",
                                                         "in its second bucket", "between leases",
                                                         "before the step", "after the step"};

/// Steps until something throws; rank 2 ends at `moment`. True where it ended without a throw.
template <class Communicator>
bool run_until_end(Communicator& comm, std::size_t moment, bool throws) {
  zero::cuda_stream stream;
  device_engine<zero::cuda, float> engine{stream};
  zero::sharded_model model{comm,
                            engine.units(),
                            zero::stage3{},
                            zero::adamw{},
                            zero::reduce_per_microbatch{},
                            {.stream = stream.native(), .deadline = std::chrono::seconds{3}}};
  engine.step(model, {}, comm.rank(), 0);
  auto const ends = [&](std::size_t here) {
    if (comm.rank() != 2 || here != moment) {
      return false;
    }
    if (throws) {
      throw std::runtime_error{"dies"};
    }
    return true;
  };
  auto const start = std::chrono::steady_clock::now();  // what streams find comes later
  while (std::chrono::steady_clock::now() - start < std::chrono::seconds{10}) {
    {
      auto micro = model.microbatch(0, 1);
      for (std::size_t u = 0; u < model.units(); ++u) {
        auto const lease = micro.forward(u);
        if (u == 1 && ends(0)) {
          return true;
        }
      }
      for (std::size_t u = model.units(); u-- > 0;) {
        {
          auto const lease = micro.backward(u);
          if (u == 2 && ends(1)) {
            return true;
          }
          for (std::size_t p = 0; p < device_units()[u].size(); ++p) {
            auto const gradient = lease.template gradient<float>(
                model.find(device_engine<zero::cuda, float>::name(u, p)));
            zero::cuda::launch(stream, gradient.size(), fill<float>{gradient.data(), 1.0F});
          }
        }
        if (u == 2 && ends(2)) {
          return true;
        }
      }
    }
    if (ends(3)) {
      return true;
    }
    model.step();
    if (ends(4)) {
      return true;
    }
  }
  return false;
}

/// What two ranks take one each of, in whatever order, again and again.
template <class Handle>
class pairs {
 public:
  template <class Make>
  [[nodiscard]] Handle take(int rank, Make const& make) {
    std::lock_guard const lock{mutex_};
    auto& mine = waiting_[static_cast<std::size_t>(rank)];
    if (mine.empty()) {
      auto made = make();
      waiting_[0].push_back(std::move(made[0]));
      waiting_[1].push_back(std::move(made[1]));
    }
    Handle out = std::move(mine.front());
    mine.pop_front();
    return out;
  }

 private:
  std::mutex mutex_;
  std::array<std::deque<Handle>, 2> waiting_;
};

/// `run(function)` calls it on three ranks; `second(rank)` is a communicator of the first two, made
/// apart.
template <class Run, class Second>
void check_dying_rank(Run const& run, Second const& second) {
  for (std::size_t moment = 0; moment < moments.size(); ++moment) {
    for (bool const throws : {true, false}) {
      failures const caught = run_failing(
          3,
          [&](auto& comm) {
            thrown const first = what_throws([&] {
              if (run_until_end(comm, moment, throws)) {
                throw std::runtime_error{"its thread ends"};
              }
            });
            if (comm.rank() == 2) {
              if (throws) {
                throw std::runtime_error{first.message};
              }
              return;
            }
            CHECK(first.after < std::chrono::seconds{3 + 5});
            // The failed communicator fails at once, the other one works.
            std::array<std::byte, 3> all{};
            thrown const later = failure_of([&] { comm.exchange(std::array{std::byte{1}}, all); });
            CHECK_MESSAGE(!later.message.empty(), moments[moment]);
            CHECK(later.after < std::chrono::milliseconds{500});
            thrown const split = failure_of([&] { static_cast<void>(comm.split(0, 0)); });
            CHECK_MESSAGE(!split.message.empty(), moments[moment]);
            CHECK(split.after < std::chrono::milliseconds{500});
            auto other = second(comm.rank());
            setting const plain{"", zero::stage3{}, zero::local_accumulate{}, {}};
            CHECK(train<float>(other, plain, zero::adamw{}, {.steps = 2}).size() == 259);
            throw std::runtime_error{first.message};
          },
          run);
      std::string const about = std::string{moments[moment]} + (throws ? ", throws: " : ": ");
      CHECK_MESSAGE(caught.took < std::chrono::seconds{20}, about);
      for (std::size_t rank = 0; rank < 2; ++rank) {
        CHECK_MESSAGE(caught.ranks[rank].says("rank 2"), about, caught.text());
      }
      CHECK_MESSAGE(caught.ranks[2].message == (throws ? "dies" : ""), about, caught.text());
    }
  }
}

}  // namespace test
