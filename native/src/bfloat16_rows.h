// Loops over values that are stored as bfloat16, for each kind of processor. The arithmetic is in bfloat16.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizers.h"

namespace monolith {

// A step of rows whose values are bfloat16, each followed by float32 state: what is the same for all rows.
struct Bfloat16Step {
  const OptimizerSpec& spec;
  StepKernel kernel;  // of the whole row
  int dim;
  std::size_t row_bytes;
  std::size_t state_byte;  // of the first float of state in a row
  std::uint64_t mixed_seed;
  bool by_chance;  // how the values are rounded; otherwise to the nearest
  float rate;
  std::int64_t step;
};

struct Bfloat16Kernels {
  void (*widen)(const std::byte* from, float* to, std::size_t count) = nullptr;
  void (*round_to_nearest)(const float* from, std::byte* to, std::size_t count) = nullptr;
  // Rounds all values of a row; `key` is its rounding_key.
  void (*round_by_chance)(const float* from, std::byte* to, std::size_t count, std::uint64_t key) = nullptr;
  // Widens, steps and rounds rows in order, each by a gradient of its own; `hashes` are those of their IDs
  // and `scratch` has room for `dim` floats. Rows and gradients are prefetched on the way.
  void (*step)(const Bfloat16Step& step, std::byte* const* rows, const std::uint64_t* hashes,
               const float* const* gradients, std::size_t count, float* scratch) = nullptr;
};

Bfloat16Kernels bfloat16_kernels(int dim, SimdLevel level = best_simd_level());

}  // namespace monolith
