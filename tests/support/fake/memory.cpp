// SPDX-License-Identifier: MIT
#include <fake/internal.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

// Device memory, pinned memory and copies.

namespace fake {
namespace detail {
namespace {

constexpr std::size_t alignment = 256;
constexpr std::size_t page = 4096;
constexpr std::size_t reserve_bytes = std::size_t{4} << 30U;
constexpr std::size_t first_memory = std::size_t{1} << 30U;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// NOLINTNEXTLINE(performance-no-int-to-ptr)
std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }
std::uintptr_t address(void const* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

struct allocation {
  std::size_t bytes;
  std::uintptr_t pages;  // where its pages begin: it ends where they end, up to the alignment
  std::size_t pages_bytes;
  int device;
};

struct pinned_allocation {
  std::size_t bytes;
  int device;
};

struct memory_state {
  std::uintptr_t reserve = 0;
  std::uintptr_t cursor = 0;  // addresses below were handed out before
  std::size_t addresses = reserve_bytes;
  std::size_t memory = first_memory;
  bool protect = true;
  std::size_t open = 0;  // how much work has device memory open
  std::map<std::uintptr_t, allocation> live;
  std::map<std::uintptr_t, pinned_allocation> pinned;
  std::array<std::size_t, max_devices> used{};
};

memory_state& state() {
  static memory_state& it = *new memory_state;
  return it;
}

void set_protection_locked(int protection) {
  for (auto const& [start, block] : state().live) {
    mprotect(pointer(block.pages), block.pages_bytes, protection);
  }
}

bool closed_locked() { return state().protect && state().open == 0; }

bool reserve_locked() {
  auto& memory = state();
  if (memory.reserve == 0) {
    void* const start =
        mmap(nullptr, reserve_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
      return false;
    }
    memory.reserve = memory.cursor = address(start);
  }
  return true;
}

// The first gap from `from` on for `bytes` and a guard page, or 0.
std::uintptr_t find_gap_locked(std::uintptr_t from, std::size_t bytes) {
  auto const& memory = state();
  std::uintptr_t start = from;
  for (auto const& [each, block] : memory.live) {
    if (block.pages + block.pages_bytes + page <= start) {
      continue;
    }
    if (block.pages >= start + bytes + page) {
      break;
    }
    start = block.pages + block.pages_bytes + page;
  }
  return start + bytes + page <= memory.reserve + memory.addresses ? start : 0;
}

void* allocate_locked(std::size_t bytes, int device) {
  auto& memory = state();
  std::size_t& used = memory.used[static_cast<std::size_t>(device)];
  if (used > memory.memory || bytes > memory.memory - used || bytes > reserve_bytes - 2 * page ||
      !reserve_locked()) {
    return nullptr;
  }
  std::size_t const pages_bytes = round_up(bytes, page);
  std::uintptr_t pages = find_gap_locked(memory.cursor, pages_bytes);
  if (pages == 0) {
    pages = find_gap_locked(memory.reserve, pages_bytes);
  }
  if (pages == 0 || mprotect(pointer(pages), pages_bytes, PROT_READ | PROT_WRITE) != 0) {
    return nullptr;
  }
  std::memset(pointer(pages), 0xFF, pages_bytes);  // NaN in every format
  std::uintptr_t const start = pages + pages_bytes - round_up(bytes, alignment);
  memory.live.emplace(start, allocation{bytes, pages, pages_bytes, device});
  memory.cursor = pages + pages_bytes + page;
  used += bytes;
  if (closed_locked()) {
    mprotect(pointer(pages), pages_bytes, PROT_NONE);
  }
  return pointer(start);
}

void free_locked(std::map<std::uintptr_t, allocation>::iterator block) {
  // A new mapping gives the pages back, and ThreadSanitizer forgets what was there.
  static_cast<void>(mmap(pointer(block->second.pages), block->second.pages_bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0));
  state().used[static_cast<std::size_t>(block->second.device)] -= block->second.bytes;
  state().live.erase(block);
}

enum class place : std::uint8_t { invalid, pageable, pinned, device };

// The block that holds the address, or the end.
template <class Blocks>
auto find_block(Blocks& blocks, std::uintptr_t at) {
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) {
    return blocks.end();
  }
  --next;
  return at < next->first + next->second.bytes ? next : blocks.end();
}

place place_locked(void const* start, std::size_t bytes) {
  auto& memory = state();
  std::uintptr_t const at = address(start);
  auto const fits = [&](auto const& block) {
    return bytes <= block->second.bytes - (at - block->first);
  };
  if (memory.reserve != 0 && at + bytes > memory.reserve && at < memory.reserve + reserve_bytes) {
    auto const block = find_block(memory.live, at);
    return block != memory.live.end() && fits(block) ? place::device : place::invalid;
  }
  if (auto const block = find_block(memory.pinned, at); block != memory.pinned.end()) {
    return fits(block) ? place::pinned : place::invalid;
  }
  auto const next = memory.pinned.lower_bound(at);
  bool const overlaps = next != memory.pinned.end() && next->first < at + bytes;
  return start == nullptr || overlaps ? place::invalid : place::pageable;
}

bool agrees(cudaMemcpyKind kind, place to, place from) {
  bool const to_device = to == place::device;
  bool const from_device = from == place::device;
  switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    case cudaMemcpyDefault: return true;
  }
  return false;
}

cudaError_t copy(CUstream_st& stream, void* to, void const* from, std::size_t bytes,
                 cudaMemcpyKind kind, bool synchronous) {
  if (bytes == 0) {
    return cudaSuccess;
  }
  place to_place{};
  place from_place{};
  {
    hidden_lock const lock;
    to_place = place_locked(to, bytes);
    from_place = place_locked(from, bytes);
    if (to_place == place::invalid || from_place == place::invalid ||
        !agrees(kind, to_place, from_place)) {
      return cudaErrorInvalidValue;
    }
    if (cudaError_t const error = check_capture_locked(stream); error != cudaSuccess) {
      return error;
    }
    bool const pageable = to_place == place::pageable || from_place == place::pageable;
    if (pageable && stream.capturing != nullptr) {
      return invalidate_locked(stream, cudaErrorStreamCaptureUnsupported);
    }
  }
  std::function<void()> work = [=] { std::memcpy(to, from, bytes); };
  if (from_place == place::pageable) {
    auto const* const start = static_cast<std::byte const*>(from);
    work = [to, staged = std::vector<std::byte>(start, start + bytes)] {
      std::memcpy(to, staged.data(), staged.size());
    };
  }
  completion* finished = nullptr;
  cudaError_t const error = add_work(stream, std::move(work), access::device, &finished);
  if (error == cudaSuccess && finished != nullptr && (synchronous || to_place == place::pageable)) {
    finished->done.wait();
    return take_failure(stream);
  }
  return error;
}

cudaError_t allocate_pinned(void** result, std::size_t bytes) {
  if (result == nullptr) {
    return cudaErrorInvalidValue;
  }
  {
    hidden_lock const lock;
    if (cudaError_t const error = refuse_unsafe_locked(); error != cudaSuccess) {
      return error;
    }
  }
  if (bytes == 0) {
    *result = nullptr;
    return cudaSuccess;
  }
  if (bytes > PTRDIFF_MAX - page) {
    return cudaErrorMemoryAllocation;
  }
  // The size isn't rounded up, so that AddressSanitizer sees where it ends.
  void* memory = nullptr;
  if (posix_memalign(&memory, page, bytes) != 0) {
    return cudaErrorMemoryAllocation;
  }
  hidden_lock const lock;
  std::memset(memory, 0xFF, bytes);
  state().pinned.emplace(address(memory), pinned_allocation{bytes, current_device()});
  *result = memory;
  return cudaSuccess;
}

}  // namespace

void open_device_memory() {
  hidden_lock const lock;
  if (state().open++ == 0 && state().protect) {
    set_protection_locked(PROT_READ | PROT_WRITE);
  }
}

void close_device_memory() {
  hidden_lock const lock;
  if (--state().open == 0 && state().protect) {
    set_protection_locked(PROT_NONE);
  }
}

bool unmap_device_memory(void* memory) {
  hidden_lock const lock;
  auto const block = state().live.find(address(memory));
  if (block == state().live.end()) {
    return false;
  }
  free_locked(block);
  return true;
}

void reset_memory_locked() {
  state().memory = first_memory;
  state().addresses = reserve_bytes;
  state().protect = true;
  if (closed_locked()) {
    set_protection_locked(PROT_NONE);
  }
}

void count_memory_locked(live_counts& counts) {
  counts.allocations = state().live.size();
  counts.pinned = state().pinned.size();
}

std::size_t device_memory_locked() { return state().memory; }

}  // namespace detail

void set_memory(std::size_t bytes) {
  detail::hidden_lock const lock;
  detail::state().memory = bytes;
}

void limit_addresses(std::size_t bytes) {
  detail::hidden_lock const lock;
  detail::state().addresses = std::min(bytes, detail::reserve_bytes);
}

void protect_device_memory(bool protect) {
  detail::hidden_lock const lock;
  detail::state().protect = protect;
  detail::set_protection_locked(detail::closed_locked() ? PROT_NONE : PROT_READ | PROT_WRITE);
}

}  // namespace fake

using namespace fake::detail;

extern "C" {

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call("cudaMemGetInfo", [&] {
    if (free == nullptr || total == nullptr) {
      return cudaErrorInvalidValue;
    }
    hidden_lock const lock;
    std::size_t const used = state().used[static_cast<std::size_t>(current_device())];
    *total = state().memory;
    *free = *total - std::min(*total, used);
    return cudaSuccess;
  });
}

cudaError_t cudaMalloc(void** result, std::size_t bytes) {
  return call("cudaMalloc", [&] {
    if (result == nullptr) {
      return cudaErrorInvalidValue;
    }
    hidden_lock const lock;
    if (cudaError_t const error = refuse_unsafe_locked(); error != cudaSuccess) {
      return error;
    }
    *result = bytes == 0 ? nullptr : allocate_locked(bytes, current_device());
    return bytes == 0 || *result != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}

cudaError_t cudaFree(void* memory) {
  return release_call("cudaFree", [&] {
    int device = 0;
    {
      hidden_lock const lock;
      if (cudaError_t const error = refuse_unsafe_locked(); error != cudaSuccess) {
        return error;
      }
      if (memory == nullptr) {
        return cudaSuccess;
      }
      auto const block = state().live.find(address(memory));
      if (block == state().live.end()) {
        return cudaErrorInvalidValue;
      }
      device = block->second.device;
    }
    wait_for_device(device);
    hidden_lock const lock;
    auto const block = state().live.find(address(memory));
    if (block == state().live.end()) {  // another thread freed it meanwhile
      return cudaErrorInvalidValue;
    }
    free_locked(block);
    return cudaSuccess;
  });
}

cudaError_t cudaMallocHost(void** result, std::size_t bytes) {
  return call("cudaMallocHost", [&] { return allocate_pinned(result, bytes); });
}

cudaError_t cudaHostAlloc(void** result, std::size_t bytes, unsigned int flags) {
  return call("cudaHostAlloc", [&] {
    constexpr unsigned int known =
        cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    return (flags & ~known) != 0 ? cudaErrorInvalidValue : allocate_pinned(result, bytes);
  });
}

cudaError_t cudaFreeHost(void* memory) {
  return release_call("cudaFreeHost", [&] {
    {
      hidden_lock const lock;
      if (cudaError_t const error = refuse_unsafe_locked(); error != cudaSuccess) {
        return error;
      }
      if (memory != nullptr && state().pinned.erase(address(memory)) == 0) {
        return cudaErrorInvalidValue;
      }
    }
    std::free(memory);
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int flags) {
  return call("cudaHostGetDevicePointer", [&] {
    hidden_lock const lock;
    if (device == nullptr || flags != 0 || place_locked(host, 1) != place::pinned) {
      return cudaErrorInvalidValue;
    }
    *device = host;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, void const* at) {
  return call("cudaPointerGetAttributes", [&] {
    if (attributes == nullptr) {
      return cudaErrorInvalidValue;
    }
    hidden_lock const lock;
    auto* const same = const_cast<void*>(at);
    *attributes = cudaPointerAttributes{};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    attributes->hostPointer = same;
    auto const block = find_block(state().live, address(at));
    auto const pinned = find_block(state().pinned, address(at));
    if (block != state().live.end()) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = block->second.device;
      attributes->hostPointer = nullptr;
      attributes->devicePointer = same;
    } else if (pinned != state().pinned.end()) {
      attributes->type = cudaMemoryTypeHost;
      attributes->device = pinned->second.device;
      attributes->devicePointer = same;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call_on("cudaMemcpyAsync", stream,
                 [&](CUstream_st& found) { return copy(found, to, from, bytes, kind, false); });
}

cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind) {
  return call_on("cudaMemcpy", nullptr, [&](CUstream_st& null_stream) {
    {
      hidden_lock const lock;
      if (cudaError_t const error = refuse_unsafe_locked(); error != cudaSuccess) {
        return error;
      }
    }
    return copy(null_stream, to, from, bytes, kind, true);
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return call_on("cudaMemsetAsync", stream, [&](CUstream_st& found) {
    if (bytes == 0) {
      return cudaSuccess;
    }
    {
      hidden_lock const lock;
      place const where = place_locked(to, bytes);
      if (where != place::device && where != place::pinned) {
        return cudaErrorInvalidValue;
      }
    }
    return add_work(
        found, [=] { std::memset(to, value, bytes); }, access::device);
  });
}

}  // extern "C"
