#include "probabilistic_filter.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "hash.h"

namespace monolith {

ProbabilisticFilter::ProbabilisticFilter(bool equal_probability, SlotThresholds thresholds,
                                         std::uint64_t seed)
    : equal_probability_(equal_probability),
      thresholds_(std::move(thresholds)),
      origin_(mix(static_cast<std::int64_t>(seed + 1))) {}  // + 1: mix(0) is 0

double ProbabilisticFilter::admission_rate(bool equal_probability, std::uint32_t count,
                                           std::uint32_t threshold) {
  if (threshold == 0) return 1;
  const double share = static_cast<double>(count) / threshold;
  return equal_probability ? 1 - std::pow(0.05, share) : std::min(1.0, share);
}

bool ProbabilisticFilter::refuses(std::int64_t id, std::uint32_t count) {
  const std::uint32_t threshold = thresholds_.of(id);
  if (threshold == 0) return false;
  constexpr std::uint64_t kStride = 0x9e3779b97f4a7c15ULL;  // spreads consecutive draws before they are mixed
  const std::uint64_t n = draws_.fetch_add(1, std::memory_order_relaxed);
  const std::uint64_t bits = mix(static_cast<std::int64_t>(origin_ + n * kStride));
  const double uniform = static_cast<double>(bits >> 11) * 0x1p-53;
  return uniform >= admission_rate(equal_probability_, count, threshold);
}

void ProbabilisticFilter::refuse(std::span<const std::int64_t> ids, std::span<const std::uint32_t> counts,
                                 std::span<std::uint8_t> mask) {
  if (mask.size() != ids.size() || (!counts.empty() && counts.size() != ids.size()))
    throw std::invalid_argument("refuse: ids, counts and mask must be of one length");
  for (std::size_t i = 0; i < ids.size(); ++i) mask[i] = refuses(ids[i], counts.empty() ? 1 : counts[i]);
}

}  // namespace monolith
