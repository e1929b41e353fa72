// The sparse optimizers by name, and how many floats of state each keeps in a row.
//
// A row's state is segment after segment. Within a segment of dim d it is:
//
//   sgd, moving_average   nothing
//   adagrad               norm[d]
//   dynamic_wd_adagrad    norm[d], last update step (int64, its bits in two floats)
//   adadelta              accum[d], accum_update[d]
//   adam                  m[d], v[d], beta1_power, beta2_power
//   amsgrad               m[d], v[d], vhat[d], beta1_power, beta2_power
//   batch_softmax         last step (int64, its bits in two floats)
//   ftrl, group_ftrl      norm[d], zero[d]
//   group_adagrad         grad_square_sum
//   momentum              n[d]
//   rmsprop, rmspropv2    n[d]
//   rowwise_adagrad       norm
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "update_rules.h"

namespace monolith {

enum class OptimizerKind : std::uint8_t {
#define MONOLITH_KIND(Rule, name) k##Rule,
  MONOLITH_OPTIMIZERS(MONOLITH_KIND)
#undef MONOLITH_KIND
};

inline constexpr std::array kOptimizerNames{
#define MONOLITH_NAME(Rule, name) std::pair<std::string_view, OptimizerKind>{name, OptimizerKind::k##Rule},
    MONOLITH_OPTIMIZERS(MONOLITH_NAME)
#undef MONOLITH_NAME
};

inline constexpr std::string_view optimizer_name(OptimizerKind kind) {
  for (const auto& [name, named] : kOptimizerNames)
    if (named == kind) return name;
  return "unknown";
}

// Throws std::invalid_argument for a name that is not listed above.
inline OptimizerKind optimizer_kind(std::string_view name) {
  for (const auto& [known, kind] : kOptimizerNames)
    if (known == name) return kind;
  std::string message = "unknown optimizer '" + std::string(name) + "'; the core knows:";
  for (const auto& [known, kind] : kOptimizerNames) message.append(" ").append(known);
  throw std::invalid_argument(message);
}

// Floats of optimizer state that a segment of `dim` values keeps in each row.
inline constexpr std::size_t state_floats(OptimizerKind kind, std::size_t dim) {
  switch (kind) {
#define MONOLITH_STATE(Rule, name) \
  case OptimizerKind::k##Rule:     \
    return rules::Rule::kVectors * dim + rules::Rule::kScalars;
    MONOLITH_OPTIMIZERS(MONOLITH_STATE)
#undef MONOLITH_STATE
  }
  return 0;
}

}  // namespace monolith
