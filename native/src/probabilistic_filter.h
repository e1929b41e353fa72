// ProbabilisticFilter: an unseen id earns a row by chance, without memory.
//
// An id seen c times against a threshold of T is admitted with probability
// min(1, c/T), or, when every sighting is to weigh the same however they are
// batched, 1 - 0.05^(c/T): 95 in 100 after T sightings.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "admission.h"
#include "slot_thresholds.h"

namespace monolith {

// Thread-safe: the n-th draw depends on the seed and n alone, and n is one atomic counter.
class ProbabilisticFilter final : public Admission {
 public:
  ProbabilisticFilter(bool equal_probability, SlotThresholds thresholds, std::uint64_t seed);

  bool refuses(std::int64_t id, std::uint32_t count) override;
  // The same for a batch, in order. Empty `counts` is one sighting each.
  void refuse(std::span<const std::int64_t> ids, std::span<const std::uint32_t> counts,
              std::span<std::uint8_t> mask);

  // How often it has drawn, which is all there is to save.
  std::uint64_t draws() const { return draws_.load(std::memory_order_relaxed); }
  void set_draws(std::uint64_t draws) { draws_.store(draws, std::memory_order_relaxed); }

  // The probability that `count` sightings admit an id; 1 for a threshold of 0.
  static double admission_rate(bool equal_probability, std::uint32_t count, std::uint32_t threshold);

 private:
  const bool equal_probability_;
  const SlotThresholds thresholds_;
  const std::uint64_t origin_;
  std::atomic<std::uint64_t> draws_{0};
};

}  // namespace monolith
