// SlidingFilter: an id earns a row after enough sightings, old sightings fade.
//
// A ring of hash filters. New ids are counted in the head block; when it is
// full the head moves on and the block ahead of it is wiped, so the oldest
// counts go first. An id found only in an older block brings its count along.
// Ids that share a cell share a count, so about one id in a hundred is off.
//
// All blocks are of one size, so an id looks at the same few cells of each.
// That is what makes locking cheap: stripes of positions, not one lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "admission.h"
#include "hash_filter.h"
#include "slot_thresholds.h"

namespace monolith {

// What a checkpoint says of the filter as a whole.
struct SlidingFilterMeta {
  std::uint32_t split_num = 0;
  std::uint32_t max_forward_step = 0;
  std::uint32_t max_backward_step = 0;
  std::uint32_t max_step = 0;
  std::uint32_t head = 0;
  std::uint32_t head_increment = 0;
  std::uint64_t failure_count = 0;
};

// And of one split.
struct FilterSplitMeta {
  std::uint64_t failure_count = 0;
  std::uint64_t total_size = 0;
  std::uint64_t num_elements = 0;
  double fill_rate = 0;
};

// Thread-safe. Calls from one thread count in the order made.
class SlidingFilter final : public Admission {
 public:
  using Cell = HashFilter::Cell;

  static constexpr std::size_t kDefaultCapacity = 300'000'000;
  static constexpr std::size_t kDefaultSplits = 7;

  // Capacity is at least 300, splits at least 5. Throws std::invalid_argument for a threshold above 15:
  // counts end there, so such an id would wait forever.
  SlidingFilter(std::size_t capacity, std::size_t splits, SlotThresholds thresholds);

  bool refuses(std::int64_t id, std::uint32_t count) override;
  // The same for a batch, in order: mask[i] is 1 when ids[i] must wait. Empty `counts` is one sighting each.
  void refuse(std::span<const std::int64_t> ids, std::span<const std::uint32_t> counts,
              std::span<std::uint8_t> mask);

  // Records sightings; the count before them, 15 when the filter has no cell for the id.
  std::uint32_t add(std::int64_t id, std::uint32_t count);
  // What add() would answer, nothing recorded.
  std::uint32_t get(std::int64_t id) const;
  // With a threshold of 0: false, nothing recorded. Otherwise records, and true up to the threshold.
  bool should_be_filtered(std::int64_t id, std::uint32_t count, std::uint32_t threshold);

  std::size_t size() const;  // cells in use; an id whose count moved along uses two
  std::uint64_t failures() const { return failures_.load(std::memory_order_relaxed); }
  std::size_t splits() const { return blocks_.size(); }

  // Saving. Each call sees one moment; hold sightings back between calls to save one moment as a whole.
  SlidingFilterMeta meta() const;
  FilterSplitMeta split_meta(std::size_t split) const;
  std::size_t cells_per_split() const { return blocks_.front()->cells().size(); }
  std::size_t capacity_per_split() const { return blocks_.front()->capacity(); }
  void read_cells(std::size_t split, std::size_t offset, std::span<Cell> out) const;

  // The filter at this moment, as another one; holds sightings off meanwhile.
  std::unique_ptr<SlidingFilter> copy() const;

  // Restoring: first the filter, which empties every split, then each split's meta and cells. Elements
  // are counted from the cells. Throws std::invalid_argument, with nothing changed by that call, when what
  // was saved does not fit this filter.
  void restore(const SlidingFilterMeta& meta);
  void restore_split(std::size_t split, const FilterSplitMeta& meta);
  void write_cells(std::size_t split, std::size_t offset, std::span<const Cell> cells);

 private:
  static constexpr std::size_t kForwardBlocks = 2;
  static constexpr std::size_t kProbes = 16;
  static constexpr std::size_t kStripes =
      32;  // the thread sanitizer follows 64 held locks, and all are held at times

  // An id's cells, in every block.
  struct Place {
    std::size_t position;
    Cell signature;
  };
  struct Found {
    std::size_t block;
    Cell* cell;            // null: no cell for the id
    std::uint32_t before;  // its count so far
  };
  struct alignas(64) Stripe {
    std::mutex mutex;
  };
  class PlaceLock;
  class WholeLock;

  SlidingFilter(const SlidingFilter& other, const WholeLock& held);

  Place place(std::int64_t id) const { return {blocks_.front()->position(id), HashFilter::signature(id)}; }
  void prefetch(const Place& place) const;
  Found find(const Place& place) const;
  std::uint32_t add(const Place& place, std::uint32_t count);
  void advance();
  std::size_t wrapped(std::size_t split) const {
    return split < blocks_.size() ? split : split - blocks_.size();
  }
  std::size_t backward_blocks() const;
  HashFilter& block(std::size_t split) const;
  void check_range(std::size_t split, std::size_t offset, std::size_t count) const;

  const SlotThresholds thresholds_;
  // The cells of positions [s * stripe_width_, (s + 1) * stripe_width_), in all blocks, belong to stripe s.
  // The head is read under any stripe and moved under all of them. Stripes are taken in ascending order.
  mutable std::array<Stripe, kStripes> stripes_;
  std::size_t stripe_width_;
  std::vector<std::unique_ptr<HashFilter>> blocks_;
  std::atomic<std::size_t> head_{0};  // atomic for prefetching, which looks without a lock
  std::uint32_t head_increment_ = 0;
  std::atomic<std::uint64_t> failures_{0};
};

}  // namespace monolith
