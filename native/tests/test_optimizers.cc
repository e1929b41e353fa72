// Kernels for every kind of processor give the same bits.
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "optimizers.h"

namespace monolith {
namespace {

OptimizerSpec spec_of(OptimizerKind kind) {
  OptimizerSpec spec;
  spec.kind = kind;
  spec.initial_accumulator_value = 0.1f;
  spec.weight_decay = 0.01f;
  spec.beta = 1.0f;
  spec.beta1 = 0.9f;
  spec.beta2 = 0.99f;
  spec.epsilon = 0.01f;
  spec.rho = 0.9f;
  spec.momentum = 0.9f;
  spec.l1 = 0.1f;
  spec.l2 = 0.1f;
  spec.decouple_weight_decay = true;
  return spec;
}

// Some steps of some rows, each its values with the state behind them, by the kernels of a level.
std::vector<float> trained(const OptimizerSpec& spec, int dim, SimdLevel level) {
  constexpr int kRows = 5;
  const std::size_t width = dim + state_floats(spec.kind, dim);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> rows(kRows * width);
  std::vector<float> gradients(kRows * dim);
  std::vector<std::byte*> row_at;
  std::vector<const float*> gradient_at;
  for (int row = 0; row < kRows; ++row) {
    float* const values = rows.data() + row * width;
    for (int i = 0; i < dim; ++i) values[i] = normal(random);
    initialize_state(spec, values + dim, dim);
    row_at.push_back(reinterpret_cast<std::byte*>(values));
    gradient_at.push_back(gradients.data() + row * dim);
  }
  const StepKernels kernels = step_kernels(spec.kind, dim, level);
  for (int step = 1; step < 4; ++step) {
    for (float& gradient : gradients) gradient = normal(random);
    kernels.many(spec, row_at.data(), width * sizeof(float), gradient_at.data(), kRows, dim, 0.05f, step);
    auto* const first = reinterpret_cast<float*>(row_at[0]);
    kernels.one(spec, first, first + dim, gradient_at[1], dim, 0.05f, step);
  }
  return rows;
}

void every_level_gives_the_same_bits() {
  const SimdLevel best = best_simd_level();
  for (const auto& [name, kind] : kOptimizerNames)
    for (const int dim : {1, 3, 4, 8, 16, 17, 32, 40, 64, 100, 128}) {
      if (kind == OptimizerKind::kBatchSoftmax && dim != 1) continue;
      for (const float decay : {0.0f, 0.01f}) {
        OptimizerSpec spec = spec_of(kind);
        spec.weight_decay = decay;
        const std::vector<float> plain = trained(spec, dim, SimdLevel::kBaseline);
        for (const SimdLevel level : {SimdLevel::kAvx2, SimdLevel::kAvx512}) {
          if (level > best) continue;
          const std::vector<float> wide = trained(spec, dim, level);
          CHECK(std::memcmp(plain.data(), wide.data(), plain.size() * sizeof(float)) == 0);
        }
      }
    }
}

void a_float_that_is_not_usable_is_found_wherever_it_is() {
  for (const std::size_t count : {1, 15, 16, 17, 40}) {
    std::vector<float> values(count, 1.0f);
    CHECK(usable(values.data(), count));
    CHECK(finite(values.data(), count));
    for (std::size_t i = 0; i < count; ++i)
      for (const float bad : {2e15f, -2e15f, std::numeric_limits<float>::quiet_NaN()}) {
        values[i] = bad;
        CHECK(!usable(values.data(), count));
        CHECK(finite(values.data(), count) == (bad == bad));
        values[i] = 1.0f;
      }
  }
}

}  // namespace
}  // namespace monolith

int main() {
  return monolith::check::run({
      {"every level gives the same bits", monolith::every_level_gives_the_same_bits},
      {"a float that is not usable is found wherever it is",
       monolith::a_float_that_is_not_usable_is_found_wherever_it_is},
  });
}
