// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <zero/device/host.hpp>

namespace {

// Types that almost model a concept.

struct event_that_cannot_wait {
  bool ready() const;
};
struct event_without_ready {
  void wait() const;
};
struct event_ready_as_int {
  int ready() const;
  void wait() const;
};
struct event_that_stays {
  event_that_stays() = default;
  event_that_stays(event_that_stays&&) = delete;
  bool ready() const;
  void wait() const;
};
struct event_of_a_stream_only {
  explicit event_of_a_stream_only(int stream);
  bool ready() const;
  void wait() const;
};

/// All of a stream; each of the others hides one member.
struct whole_stream {
  explicit whole_stream(bool threaded = false);
  bool threaded() const;
  bool capturing() const;
  void record(zero::host_event&);
  void wait(zero::host_event const&);
  void synchronize();
};
struct stream_without_threaded : whole_stream {
  using whole_stream::whole_stream;

 private:
  using whole_stream::threaded;
};
struct stream_without_record : whole_stream {
  using whole_stream::whole_stream;

 private:
  using whole_stream::record;
};
struct stream_without_wait : whole_stream {
  using whole_stream::whole_stream;

 private:
  using whole_stream::wait;
};
struct stream_without_synchronize : whole_stream {
  using whole_stream::whole_stream;

 private:
  using whole_stream::synchronize;
};
struct inherits_constructors : whole_stream {
  using whole_stream::whole_stream;
};
struct stream_with_another_event : whole_stream {
  using whole_stream::whole_stream;
  void record(event_without_ready&);
};

// A device that hides one member of `host` behind one that doesn't fit.
struct derived : zero::host {};
struct device_without_launch : zero::host {
  static void launch(stream&);
};
struct device_without_accumulate : zero::host {
  static void accumulate(stream&);
};
struct device_without_copy : zero::host {
  static void copy(stream&);
};
struct device_without_add : zero::host {
  static void add(stream&);
};
struct device_without_convert : zero::host {
  static void convert(stream&);
};
struct device_without_fill : zero::host {
  static void fill_zero(stream&);
};
struct device_without_name : zero::host {
  static constexpr int name = 0;
};
struct device_that_allocates_bytes : zero::host {
  static std::byte* allocate(std::size_t);
};
struct device_whose_deallocate_may_throw : zero::host {
  static void deallocate(void*, std::size_t);
};
struct device_whose_end_may_throw : zero::host {
  template <class Work>
  static void clean_up(Work const& work);
};
struct device_without_alignment : zero::host {
  static constexpr char const* alignment_bytes = "64";
};
struct device_with_a_poor_stream : zero::host {
  using stream = stream_without_record;
};
struct device_with_a_poor_event : zero::host {
  using event = event_without_ready;
};

static_assert(zero::device_event<zero::host_event>);
static_assert(!zero::device_event<event_that_cannot_wait>);
static_assert(!zero::device_event<event_without_ready>);
static_assert(!zero::device_event<event_ready_as_int>);
static_assert(!zero::device_event<event_that_stays>);
static_assert(!zero::device_event<event_of_a_stream_only>);

static_assert(zero::device_stream<zero::host_stream, zero::host_event>);
static_assert(zero::device_stream<whole_stream, zero::host_event>);
static_assert(zero::device_stream<inherits_constructors, zero::host_event>);
static_assert(!zero::device_stream<stream_without_threaded, zero::host_event>);
static_assert(!zero::device_stream<stream_without_record, zero::host_event>);
static_assert(!zero::device_stream<stream_without_wait, zero::host_event>);
static_assert(!zero::device_stream<stream_without_synchronize, zero::host_event>);
static_assert(!zero::device_stream<stream_with_another_event, zero::host_event>);

static_assert(zero::device<zero::host> && zero::device<derived>);
static_assert(!zero::device<int>);
static_assert(!zero::device<device_without_launch>);
static_assert(!zero::device<device_without_accumulate>);
static_assert(!zero::device<device_without_copy>);
static_assert(!zero::device<device_without_add>);
static_assert(!zero::device<device_without_convert>);
static_assert(!zero::device<device_without_fill>);
static_assert(!zero::device<device_without_name>);
static_assert(!zero::device<device_that_allocates_bytes>);
static_assert(!zero::device<device_whose_deallocate_may_throw>);
static_assert(!zero::device<device_whose_end_may_throw>);
static_assert(!zero::device<device_without_alignment>);
static_assert(!zero::device<device_with_a_poor_stream>);
static_assert(!zero::device<device_with_a_poor_event>);

}  // namespace

TEST_CASE("the host is a device, and what lacks one member is none") {
  CHECK(zero::host::name == "host");
}
