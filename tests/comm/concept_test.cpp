// SPDX-License-Identifier: MIT
#include <zero/comm/concept.hpp>
#include <zero/comm/metered.hpp>
#include <zero/comm/solo.hpp>
#include <zero/comm/threads.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string_view>

namespace {

using zero::any_span;
using zero::combine;
using zero::const_any_span;
using zero::host_stream;
using zero::reduction;

/// A stranger's communicator, with all that the concept asks for.
struct stranger {
  using device = zero::host;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  void set_deadline(std::chrono::milliseconds deadline);
  void reduce_scatter(const_any_span full, any_span shard, combine how, reduction what,
                      host_stream& stream);
  void all_gather(const_any_span shard, any_span full, host_stream& stream);
  void all_reduce(const_any_span full, any_span result, combine how, reduction what,
                  host_stream& stream);
  void broadcast(any_span data, int root, host_stream& stream);
  void barrier(host_stream& stream);
  void exchange(std::span<std::byte const> mine, std::span<std::byte> all);
  stranger split(int color, int key);
  void abort(std::string_view reason) noexcept;
};

// Each lacks one thing, or has it in another form.
struct without_reduce_scatter : stranger {
  void reduce_scatter(const_any_span full, any_span shard,
                      host_stream& stream);  // no add, no average
  without_reduce_scatter split(int color, int key);
};
struct without_all_gather : stranger {
  void all_gather() = delete;
  without_all_gather split(int color, int key);
};
struct without_all_reduce : stranger {
  void all_reduce(any_span full, any_span result, combine how, reduction what,
                  host_stream& stream);  // would write its input
  without_all_reduce split(int color, int key);
};
struct without_broadcast : stranger {
  void broadcast(any_span data, host_stream& stream);  // no root
  without_broadcast split(int color, int key);
};
struct without_barrier : stranger {
  void barrier();  // of the host, not in a stream
  without_barrier split(int color, int key);
};
struct without_exchange : stranger {
  void exchange(std::span<std::byte const> mine);
  without_exchange split(int color, int key);
};
struct without_split : stranger {};  // its parts would be strangers
struct without_abort : stranger {
  void abort(std::string_view reason);  // may throw
  without_abort split(int color, int key);
};
struct without_device : stranger {
  using device = int;
  without_device split(int color, int key);
};
struct unmovable : stranger {
  unmovable(unmovable const&) = delete;
  unmovable split(int color, int key);
};

static_assert(zero::communicator<stranger>);
static_assert(zero::communicator<zero::metered<stranger>>);
static_assert(!zero::communicator<without_reduce_scatter>);
static_assert(!zero::has_reduce_scatter<without_reduce_scatter>);
static_assert(!zero::communicator<without_all_gather>);
static_assert(!zero::has_all_gather<without_all_gather>);
static_assert(!zero::communicator<without_all_reduce>);
static_assert(!zero::has_all_reduce<without_all_reduce>);
static_assert(!zero::communicator<without_broadcast>);
static_assert(!zero::has_broadcast<without_broadcast>);
static_assert(!zero::communicator<without_barrier>);
static_assert(!zero::has_barrier<without_barrier>);
static_assert(!zero::communicator<without_exchange>);
static_assert(!zero::has_exchange<without_exchange>);
static_assert(!zero::communicator<without_split>);
static_assert(!zero::has_split<without_split>);
static_assert(!zero::communicator<without_abort>);
static_assert(!zero::has_abort<without_abort>);
static_assert(!zero::communicator<without_device>);
static_assert(!zero::communicator<unmovable>);
static_assert(!zero::communicator<int>);
static_assert(!zero::communicator<zero::solo const>);

}  // namespace

TEST_CASE("every communicator of the library models the concept") {
  CHECK(zero::communicator<zero::solo>);
  CHECK(zero::communicator<zero::thread_communicator>);
  CHECK(zero::communicator<zero::metered<zero::solo>>);
  CHECK(zero::communicator<zero::metered<zero::thread_communicator>>);
}
