// Loops over values that are stored as bfloat16, for each kind of processor. The arithmetic is in bfloat16.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizers.h"

namespace monolith {

struct Bfloat16Kernels {
  void (*widen)(const std::byte* from, float* to, std::size_t count) = nullptr;
  void (*round_to_nearest)(const float* from, std::byte* to, std::size_t count) = nullptr;
  // Rounds all values of a row; `key` is its rounding_key.
  void (*round_by_chance)(const float* from, std::byte* to, std::size_t count, std::uint64_t key) = nullptr;
};

Bfloat16Kernels bfloat16_kernels(SimdLevel level = best_simd_level());

}  // namespace monolith
