// Kernels of the sparse optimizers in host memory: the rules of update_rules.h over rows.
//
// A step is a kernel over the segment's floats, picked once per table by optimizer and width; inside it there
// is no branch on either.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizer_kind.h"

namespace monolith {

// The hyper-parameters of every optimizer; each reads only its own. Defaults live in the Python configs.
struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kSgd;
  float initial_accumulator_value = 0;
  float weight_decay = 0;
  float beta = 0;
  float beta1 = 0;
  float beta2 = 0;
  float epsilon = 0;
  float rho = 0;
  float momentum = 0;
  float l1 = 0;
  float l2 = 0;
  float lambda = 0;      // of delay compensation
  float decay_rate = 0;  // of lazy decay: the rate that rows decay by before a step has said one
  bool use_nesterov = false;
  bool decouple_weight_decay = false;
  bool lazy_decay = false;           // a row also decays by the steps that it was not in
  bool delay_compensated = false;    // first g += lambda * g^2 * (w - latest)
  bool stochastic_rounding = false;  // afterwards w is rounded to a half-precision neighbour

  bool operator==(const OptimizerSpec&) const = default;
};

// Whether all of `count` floats are usable, or finite.
bool usable(const float* gradients, std::size_t count);
bool finite(const float* values, std::size_t count);

// One step of values `w` and state `state` by gradient `g`, `dim` floats each. A rate of zero, as at
// the first step of a warm-up, leaves the optimizers that divide by it untouched.
using StepKernel = void (*)(const OptimizerSpec& spec, float* w, float* state, const float* g, int dim,
                            float rate, std::int64_t step);

// The same for `count` rows in order, each its values with the state behind them and each by a gradient of
// its own. Rows and gradients are prefetched on the way.
using StepsKernel = void (*)(const OptimizerSpec& spec, std::byte* const* rows, std::size_t row_bytes,
                             const float* const* gradients, std::size_t count, int dim, float rate,
                             std::int64_t step);

struct StepKernels {
  StepKernel one = nullptr;
  StepsKernel many = nullptr;
};

// Which instructions the kernels are compiled for. The core runs on any x86-64 or ARM processor and picks,
// when a table is made, the widest kind that the processor has; all give the same bits.
enum class SimdLevel : std::uint8_t { kBaseline, kAvx2, kAvx512 };
SimdLevel best_simd_level();

StepKernels step_kernels(OptimizerKind kind, int dim, SimdLevel level = best_simd_level());

void initialize_state(const OptimizerSpec& spec, float* state, int dim);

}  // namespace monolith
