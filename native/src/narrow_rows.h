// Loops over values that rows store in fewer bits than float32, for each kind of processor. The arithmetic is
// in narrow.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optimizers.h"

namespace monolith {

enum class ValueCoding : std::uint8_t { kFloat32, kBfloat16, kFloat16, kInt8 };

// The values of a narrow row, which it begins with: `dim` codes, of 2 bytes or 1; then, of int8, up to a
// multiple of 4 bytes and one float32 scale for each of `widths`, neighbours that share it.
struct NarrowRow {
  int dim;
  std::vector<int> widths;
};

std::size_t narrow_bytes(ValueCoding coding, const NarrowRow& row);

// A step of rows whose values are narrow, each followed by float32 state: what is the same for all rows.
struct NarrowStep {
  const OptimizerSpec& spec;
  StepKernel kernel;  // of the whole row
  const NarrowRow& row;
  std::size_t row_bytes;
  std::size_t state_byte;  // of the first float of state in a row
  std::uint64_t mixed_seed;
  bool by_chance;  // how the values are rounded; otherwise to the nearest
  float rate;
  std::int64_t step;
};

struct NarrowKernels {
  // Reads the values of `count` rows that are side by side, narrow_bytes each.
  void (*widen)(const NarrowRow& row, const std::byte* from, float* to, std::size_t count) = nullptr;
  // Rounds all values of a row to the nearest, or by chances that follow from `key`, its rounding_key.
  void (*round_to_nearest)(const NarrowRow& row, const float* from, std::byte* to) = nullptr;
  void (*round_by_chance)(const NarrowRow& row, const float* from, std::byte* to,
                          std::uint64_t key) = nullptr;
  // Widens, steps and rounds rows in order, each by a gradient of its own; `hashes` are those of their IDs
  // and `scratch` has room for the values of one. Rows and gradients are prefetched on the way.
  void (*step)(const NarrowStep& step, std::byte* const* rows, const std::uint64_t* hashes,
               const float* const* gradients, std::size_t count, float* scratch) = nullptr;
};

// `coding` is not kFloat32.
NarrowKernels narrow_kernels(ValueCoding coding, int dim, SimdLevel level = best_simd_level());

}  // namespace monolith
