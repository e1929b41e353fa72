// DistinctIds: the distinct ids of one table in a batch, numbered in the order they come.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hash.h"

namespace monolith {

// It writes each distinct id to `ids`, and how often it came to `counts`: arrays of `at_most` entries.
class DistinctIds {
 public:
  DistinctIds(std::size_t at_most, std::int64_t* ids, std::int64_t* counts)
      : bits_(std::bit_width(at_most + at_most / 2)),
        numbers_(std::size_t{1} << bits_, kFree),
        ids_(ids),
        counts_(counts) {}

  // Asks for what `number` will look at first. The table of a large batch is beyond the nearest cache, and
  // one miss after another costs more than all the rest.
  void prefetch(std::int64_t id) const { __builtin_prefetch(numbers_.data() + home(id), 1); }

  // Asks for what it will look at then: the id that was found there, if any.
  void prefetch_id(std::int64_t id) const {
    const std::uint32_t number = numbers_[home(id)];
    if (number == kFree) return;
    __builtin_prefetch(ids_ + number);
    __builtin_prefetch(counts_ + number, 1);
  }

  std::uint32_t number(std::int64_t id) {
    const std::size_t mask = numbers_.size() - 1;
    for (std::size_t at = home(id);; at = (at + 1) & mask) {
      const std::uint32_t number = numbers_[at];
      if (number == kFree) {
        ids_[size_] = id;
        counts_[size_] = 1;
        return numbers_[at] = size_++;
      }
      if (ids_[number] == id) {
        ++counts_[number];
        return number;
      }
    }
  }

  std::size_t size() const { return size_; }

 private:
  static constexpr std::uint32_t kFree = UINT32_MAX;

  std::size_t home(std::int64_t id) const { return mix(id) >> 1 >> (63 - bits_); }

  const int bits_;
  std::vector<std::uint32_t> numbers_;  // by hash, a third of them free at least
  std::int64_t* const ids_;
  std::int64_t* const counts_;
  std::uint32_t size_ = 0;
};

}  // namespace monolith
