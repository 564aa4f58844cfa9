// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/bfloat16.hpp>
#include <zero/core/float16.hpp>

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

/// @file
/// What the fake NCCL does with elements.

namespace fake::detail {

inline std::size_t nccl_size(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
  }
}

template <class T>
T nccl_combine(T a, T b, ncclRedOp_t op) {
  auto const apply = [&](auto x, auto y) {
    switch (op) {
      case ncclProd: return static_cast<T>(x * y);
      case ncclMax: return static_cast<T>(std::max(x, y));
      case ncclMin: return static_cast<T>(std::min(x, y));
      default: return static_cast<T>(x + y);
    }
  };
  if constexpr (std::is_arithmetic_v<T>) {
    return apply(a, b);
  } else {
    return apply(static_cast<float>(a), static_cast<float>(b));
  }
}

template <class T>
T nccl_divide(T sum, std::size_t ranks) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    return sum / static_cast<T>(ranks);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(sum / static_cast<T>(ranks));
  } else {
    return static_cast<T>(static_cast<float>(sum) / static_cast<float>(ranks));
  }
}

/// The elements [first, first + count) of all inputs, as a ring sums them for their owner.
template <class T>
void nccl_ring(std::vector<void const*> const& inputs, std::size_t first, std::size_t count,
               std::size_t owner, ncclRedOp_t op, T* out) {
  std::size_t const ranks = inputs.size();
  for (std::size_t i = 0; i < count; ++i) {
    auto const value = [&](std::size_t hop) {
      return static_cast<T const*>(inputs[(owner + hop) % ranks])[first + i];
    };
    T sum = value(1);
    for (std::size_t hop = 2; hop <= ranks; ++hop) {
      sum = nccl_combine(sum, value(hop), op);
    }
    out[i] = op == ncclAvg ? nccl_divide(sum, ranks) : sum;
  }
}

/// The same of a type known at run time.
inline void nccl_reduce(std::vector<void const*> const& inputs, std::size_t first,
                        std::size_t count, std::size_t owner, ncclDataType_t type, ncclRedOp_t op,
                        std::byte* out) {
  auto const run = [&]<class T>(std::type_identity<T>) {
    nccl_ring(inputs, first, count, owner, op, reinterpret_cast<T*>(out));
  };
  switch (type) {
    case ncclInt8: return run(std::type_identity<std::int8_t>{});
    case ncclUint8: return run(std::type_identity<std::uint8_t>{});
    case ncclInt32: return run(std::type_identity<std::int32_t>{});
    case ncclUint32: return run(std::type_identity<std::uint32_t>{});
    case ncclInt64: return run(std::type_identity<std::int64_t>{});
    case ncclUint64: return run(std::type_identity<std::uint64_t>{});
    case ncclFloat16: return run(std::type_identity<zero::float16>{});
    case ncclBfloat16: return run(std::type_identity<zero::bfloat16>{});
    case ncclFloat64: return run(std::type_identity<double>{});
    default: return run(std::type_identity<float>{});
  }
}

}  // namespace fake::detail
