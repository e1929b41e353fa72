// TouchedKeySet: the ids changed since the last delta was taken.
//
// Training inserts ids by the batch from many threads; now and then a publisher
// steals them all. A set that outgrows its capacity, because no publisher stole, is
// emptied and the loss reported: better a gap one knows of than memory without end.
//
// Slots are filled by compare-and-swap and never emptied while anyone inserts,
// so inserts need no locks among themselves. A gate, taken once per batch, keeps
// them apart from what empties the set.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "memory.h"

namespace monolith {

// Thread-safe. Any int64 is a key.
class TouchedKeySet {
 public:
  static constexpr std::size_t kDefaultCapacity = (std::size_t{64} << 20) / 32;

  // Memory comes with the first insert. Throws std::invalid_argument for a capacity no machine has room for.
  explicit TouchedKeySet(std::size_t capacity = kDefaultCapacity);

  // For each id in order: if the set holds more than `capacity` keys it is emptied first; then the id is
  // added if absent. Returns how many keys were dropped by emptying.
  std::size_t insert(std::span<const std::int64_t> ids);

  // Takes all keys, in no order. A key inserted meanwhile is in this answer or in the next, never both.
  std::vector<std::int64_t> steal();

  // Counts `keys` changes as lost that never came here, because they were too many to tell one by one.
  void lose(std::size_t keys) { lost_.fetch_add(keys, std::memory_order_relaxed); }

  // Keys dropped, ever: a subscriber has missed changes if it has grown.
  std::uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }
  std::size_t size() const;
  std::size_t capacity() const { return capacity_; }

 private:
  // Many may enter or one may close. A thread that closes the gate holds the turnstile, so that a stream of
  // inserts cannot keep a steal waiting.
  class Gate {
   public:
    std::shared_lock<std::shared_mutex> enter() {
      std::lock_guard turn(turnstile_);
      return std::shared_lock(inside_);
    }
    std::unique_lock<std::shared_mutex> close() {
      std::lock_guard turn(turnstile_);
      return std::unique_lock(inside_);
    }

   private:
    std::mutex turnstile_;
    std::shared_mutex inside_;
  };

  std::size_t claim(std::size_t wanted);
  void fill(std::span<const std::int64_t> ids);
  bool fill_slot(std::uint64_t hash);
  void clear();

  // The slots, and one bit for each line of them that says whether a key was put there: to take few keys out
  // of a large set is to look at few lines.
  struct Slots {
    explicit Slots(std::size_t count);
    Region keys;  // mix(id); 0 is free
    std::vector<std::uint64_t> lines;
  };

  const std::size_t capacity_;
  const std::size_t slot_count_;  // a power of two

  mutable Gate gate_;  // entered to fill slots, closed to replace or empty them; guards all below
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<Slots> spare_;         // empty slots left by the last steal
  std::atomic<bool> holds_zero_{false};  // the one key whose hash looks like a free slot
  // Keys in the set, plus room promised to inserts under way. With the gate closed it is the size.
  std::atomic<std::size_t> claimed_{0};
  std::atomic<std::uint64_t> lost_{0};  // needs no guard
};

}  // namespace monolith
