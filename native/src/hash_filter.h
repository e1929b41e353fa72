// A hash filter counts sightings in 16 bits per id.
//
// A cell holds a 12-bit signature and a 4-bit count, and an id looks for its
// cell from its position onward. Two ids may share a cell, so a count may run
// high; it never runs low. Not thread-safe: SlidingFilter guards its blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "hash.h"
#include "memory.h"

namespace monolith {

class HashFilter {
 public:
  using Cell = std::uint16_t;  // 0 is an empty cell

  static constexpr std::uint32_t kMaxCount = 15;
  static constexpr std::size_t kMaxProbes = 64;

  // Memory is committed when first written to.
  HashFilter(std::size_t capacity, double fill_rate)
      : capacity_(capacity),
        fill_rate_(fill_rate),
        total_size_(
            std::max<std::size_t>(1, static_cast<std::size_t>(static_cast<double>(capacity) * fill_rate))),
        region_((total_size_ + kMaxProbes) * sizeof(Cell)) {}

  static Cell signature(std::int64_t id) {
    const auto bits = static_cast<std::uint64_t>(id);
    return (bits >> 17 | bits << 15) & 0xfff;
  }
  // Where an id begins to look. The same in every filter of this total_size.
  std::size_t position(std::int64_t id) const { return mix(id) % total_size_; }

  // The cell that holds the signature or is free for it; null when `probes` cells are taken by others.
  // The cells behind total_size make wrapping around needless.
  Cell* find(std::size_t position, Cell signature, std::size_t probes) {
    Cell* cell = cells().data() + position;
    for (Cell* const end = cell + probes; cell != end; ++cell)
      if (*cell == 0 || *cell >> 4 == signature) return cell;
    return nullptr;
  }
  static std::uint32_t count(Cell cell) { return cell & 0xf; }

  // Adds to a cell that find() gave. `sightings` of 0 leave no trace.
  void add_to(Cell& cell, Cell signature, std::uint32_t sightings) {
    if (sightings == 0) return;
    if (cell == 0) elements_.fetch_add(1, std::memory_order_relaxed);
    cell =
        static_cast<Cell>(signature << 4 | std::min(kMaxCount, count(cell) + std::min(kMaxCount, sightings)));
  }

  // Counts on its own: the count before adding, or 15 when there is no cell left.
  std::uint32_t add(std::int64_t id, std::uint32_t sightings) {
    Cell* cell = find(position(id), signature(id), kMaxProbes);
    if (cell == nullptr) {
      ++failures_;
      return kMaxCount;
    }
    const std::uint32_t before = count(*cell);
    add_to(*cell, signature(id), sightings);
    return before;
  }
  std::uint32_t get(std::int64_t id) {
    const Cell* cell = find(position(id), signature(id), kMaxProbes);
    return cell == nullptr ? kMaxCount : count(*cell);
  }

  bool full() const { return elements() + 1 >= capacity_; }
  void clear() {
    if (elements() != 0) std::memset(region_.data(), 0, region_.size());  // an unused block stays uncommitted
    elements_.store(0, std::memory_order_relaxed);
    failures_ = 0;
  }
  // Overwrites cells with saved ones, and counts the elements anew.
  void write(std::size_t offset, std::span<const Cell> saved) {
    const auto to = cells().subspan(offset, saved.size());
    elements_.fetch_add(used(saved) - used(to), std::memory_order_relaxed);
    std::copy(saved.begin(), saved.end(), to.begin());
  }
  // Becomes as `other`, which is of the same size; an unused one costs nothing.
  void copy(const HashFilter& other) {
    if (other.elements() != 0) std::memcpy(region_.data(), other.region_.data(), region_.size());
    elements_.store(other.elements_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    failures_ = other.failures_;
  }
  void set_failures(std::uint64_t failures) { failures_ = failures; }

  std::size_t capacity() const { return capacity_; }
  double fill_rate() const { return fill_rate_; }
  std::size_t total_size() const { return total_size_; }
  std::size_t elements() const { return std::min(capacity_, elements_.load(std::memory_order_relaxed)); }
  std::uint64_t failures() const { return failures_; }
  std::span<Cell> cells() const {
    return {reinterpret_cast<Cell*>(region_.data()), region_.size() / sizeof(Cell)};
  }

 private:
  static std::size_t used(std::span<const Cell> cells) {
    return cells.size() - static_cast<std::size_t>(std::count(cells.begin(), cells.end(), Cell{0}));
  }

  const std::size_t capacity_;
  const double fill_rate_;
  const std::size_t total_size_;
  Region region_;
  std::atomic<std::size_t> elements_{0};  // atomic, as cells of one block may be filled under different locks
  std::uint64_t failures_ = 0;
};

}  // namespace monolith
