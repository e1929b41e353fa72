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

  // How many places a search for an id looks at, the free one included if the id is not there.
  std::size_t probes(std::int64_t id) const {
    const std::size_t mask = numbers_.size() - 1;
    std::size_t at = home(id), count = 1;
    for (; numbers_[at] != kFree && ids_[numbers_[at]] != id; at = (at + 1) & mask) ++count;
    return count;
  }

 private:
  static constexpr std::uint32_t kFree = UINT32_MAX;

  // Tables keep their rows in the order of mix(id), by its high bits or by its low ones. Consecutive ids of a
  // table have nearly the same of those bits, so all of them would begin at a few places here. The high bits
  // of a product depend on all bits of the hash.
  std::size_t home(std::int64_t id) const { return mix(id) * kSpread >> 1 >> (63 - bits_); }

  static constexpr std::uint64_t kSpread = 0x9e3779b97f4a7c15ULL;  // 2^64 by the golden ratio; odd

  const int bits_;
  std::vector<std::uint32_t> numbers_;  // by hash, a third of them free at least
  std::int64_t* const ids_;
  std::int64_t* const counts_;
  std::uint32_t size_ = 0;
};

}  // namespace monolith
