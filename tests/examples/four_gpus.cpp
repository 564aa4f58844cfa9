// SPDX-License-Identifier: MIT
#include <fake/cuda.hpp>

// Linked with the fake, a program finds four devices.

namespace {

[[maybe_unused]] bool const four_gpus = (fake::set_device_count(4), true);

}  // namespace
