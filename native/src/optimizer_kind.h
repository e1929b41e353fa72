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
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace monolith {

enum class OptimizerKind : std::uint8_t {
  kSgd,
  kAdagrad,
  kDynamicWdAdagrad,
  kAdadelta,
  kAdam,
  kAmsgrad,
  kBatchSoftmax,
  kFtrl,
  kGroupAdagrad,
  kGroupFtrl,
  kMomentum,
  kMovingAverage,
  kRmsprop,
  kRmspropV2,
};

inline constexpr std::array<std::pair<std::string_view, OptimizerKind>, 14> kOptimizerNames{{
    {"sgd", OptimizerKind::kSgd},
    {"adagrad", OptimizerKind::kAdagrad},
    {"dynamic_wd_adagrad", OptimizerKind::kDynamicWdAdagrad},
    {"adadelta", OptimizerKind::kAdadelta},
    {"adam", OptimizerKind::kAdam},
    {"amsgrad", OptimizerKind::kAmsgrad},
    {"batch_softmax", OptimizerKind::kBatchSoftmax},
    {"ftrl", OptimizerKind::kFtrl},
    {"group_adagrad", OptimizerKind::kGroupAdagrad},
    {"group_ftrl", OptimizerKind::kGroupFtrl},
    {"momentum", OptimizerKind::kMomentum},
    {"moving_average", OptimizerKind::kMovingAverage},
    {"rmsprop", OptimizerKind::kRmsprop},
    {"rmspropv2", OptimizerKind::kRmspropV2},
}};

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

// An int64 held by its bits in the float state takes this many floats.
inline constexpr std::size_t kInt64Floats = sizeof(std::int64_t) / sizeof(float);

// Floats of optimizer state that a segment of `dim` values keeps in each row.
inline constexpr std::size_t state_floats(OptimizerKind kind, std::size_t dim) {
  switch (kind) {
    case OptimizerKind::kSgd:
    case OptimizerKind::kMovingAverage:
      return 0;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kMomentum:
    case OptimizerKind::kRmsprop:
    case OptimizerKind::kRmspropV2:
      return dim;
    case OptimizerKind::kDynamicWdAdagrad:
      return dim + kInt64Floats;
    case OptimizerKind::kAdadelta:
    case OptimizerKind::kFtrl:
    case OptimizerKind::kGroupFtrl:
      return 2 * dim;
    case OptimizerKind::kAdam:
      return 2 * dim + 2;
    case OptimizerKind::kAmsgrad:
      return 3 * dim + 2;
    case OptimizerKind::kBatchSoftmax:
      return kInt64Floats;
    case OptimizerKind::kGroupAdagrad:
      return 1;
  }
  return 0;
}

}  // namespace monolith
