// SPDX-License-Identifier: MIT
#pragma once

#include <zero/core/dtype.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

/// @file
/// `tensor_traits`: the one place where an engine says where its tensor's elements are, and the
/// concepts that follow from what it says.

namespace zero::inline v0 {

class host;

/// The customization point for tensors; specialize it with
///
///   using value_type                               an `element`
///   using device                                   where the elements are (`zero::host`)
///   static std::span<value_type> elements(T&)      all elements, contiguous (contiguous_tensor)
///   static void rebind(T&, std::span<value_type>)  zero copies: the elements are now that storage,
///                                                  which may be empty; storage that the tensor
///                                                  owned is given up (rebindable_tensor)
///   static void allocate(T&, std::size_t n)        the tensor owns n elements again; only
///                                                  release() asks for it (allocatable_tensor)
///
/// Host containers and spans whose elements are contiguous need no specialization.
template <class T>
struct tensor_traits {};

template <class T>
  requires requires(T& tensor) {
    { std::span{tensor} };
    requires element<typename decltype(std::span{tensor})::element_type>;
    requires !std::is_const_v<typename decltype(std::span{tensor})::element_type>;
  }
struct tensor_traits<T> {
  using value_type = typename decltype(std::span{std::declval<T&>()})::value_type;
  using device = host;
  static std::span<value_type> elements(T& tensor) { return std::span{tensor}; }
};

/// A tensor whose elements are one contiguous span.
template <class T>
concept contiguous_tensor = requires(T& tensor) {
  typename tensor_traits<T>::value_type;
  typename tensor_traits<T>::device;
  requires element<typename tensor_traits<T>::value_type>;
  {
    tensor_traits<T>::elements(tensor)
  } -> std::same_as<std::span<typename tensor_traits<T>::value_type>>;
};

/// A tensor that can be pointed at other storage without a copy.
template <class T>
concept rebindable_tensor =
    contiguous_tensor<T> &&
    requires(T& tensor, std::span<typename tensor_traits<T>::value_type> storage) {
      tensor_traits<T>::rebind(tensor, storage);
    };

/// A tensor that can be given storage of its own again.
template <class T>
concept allocatable_tensor = contiguous_tensor<T> && requires(T& tensor, std::size_t n) {
  tensor_traits<T>::allocate(tensor, n);
};

}  // namespace zero::inline v0
