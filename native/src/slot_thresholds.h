// How often an id must have been seen to earn a row: a default, and exceptions by slot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "hash.h"

namespace monolith {

class SlotThresholds {
 public:
  // `by_slot` maps a slot to its threshold; 0 asks nothing. Throws std::invalid_argument for a slot that
  // no id can have.
  explicit SlotThresholds(std::uint32_t otherwise = 0,
                          const std::map<std::uint32_t, std::uint32_t>& by_slot = {})
      : otherwise_(otherwise), largest_(otherwise) {
    if (by_slot.empty()) return;
    flat_.assign(kMaxSlots, otherwise);
    for (const auto& [slot, threshold] : by_slot) {
      if (slot >= kMaxSlots)
        throw std::invalid_argument("occurrence threshold for slot " + std::to_string(slot) +
                                    ": slots end at " + std::to_string(kMaxSlots - 1));
      flat_[slot] = threshold;
      largest_ = std::max(largest_, threshold);
    }
  }

  std::uint32_t of(std::int64_t id) const { return flat_.empty() ? otherwise_ : flat_[slot_of(id)]; }
  std::uint32_t largest() const { return largest_; }

 private:
  std::uint32_t otherwise_;
  std::uint32_t largest_;
  std::vector<std::uint32_t> flat_;  // one per slot; empty when all are the same
};

}  // namespace monolith
