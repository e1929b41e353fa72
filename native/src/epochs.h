// Epochs: when memory that readers may still use can be freed (epoch-based reclamation).
//
// Readers of a table take no lock, so an index array that has been replaced must outlive every call that
// could have seen it. A call takes a seat for its duration, marked with the current epoch; retired memory is
// freed once no seat has an epoch that is as old as its retirement.
//
//   reader   seat.since = 7      ...reads the old index...      seat.since = 0
//   writer       publishes the new index, retires the old one at 7, now_ = 8   ->  freed after the reader
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace monolith {

class Epochs {
  struct alignas(64) Seat {
    std::atomic<std::uint64_t> since{0};  // the epoch at which its call sat down; 0 is an empty seat
  };

 public:
  Epochs() = default;
  Epochs(const Epochs&) = delete;
  ~Epochs() { drain(); }

  // One batched call, seated from construction to destruction.
  class Visit {
   public:
    explicit Visit(Epochs& epochs) : seat_(epochs.sit()) {}
    ~Visit() { seat_.since.store(0, std::memory_order_release); }
    Visit(const Visit&) = delete;

   private:
    Seat& seat_;
  };

  // Runs `free` once no call that is seated now is left. The memory must already be out of reach of
  // calls that sit down later.
  void retire(std::function<void()> free) {
    std::lock_guard lock(mutex_);
    retired_.emplace_back(now_.fetch_add(1), std::move(free));
    collect_locked();
  }

  // The same in two halves: the first may throw, the second does not, and leaves the freeing to collect().
  // No other thread may retire anything in between.
  void reserve_one() {
    std::lock_guard lock(mutex_);
    retired_.reserve(retired_.size() + 1);
  }
  void retire_reserved(std::function<void()>&& free) noexcept {
    std::lock_guard lock(mutex_);
    retired_.emplace_back(now_.fetch_add(1), std::move(free));
    pending_.store(retired_.size(), std::memory_order_relaxed);
  }

  // Frees everything, for an owner who knows that no call is left.
  void drain() {
    std::lock_guard lock(mutex_);
    for (auto& [when, free] : retired_) free();
    retired_.clear();
  }

  // Whether something waits to be freed.
  bool pending() const { return pending_.load(std::memory_order_relaxed) != 0; }

  // Frees what can be freed by now.
  void collect() {
    if (!pending()) return;
    std::lock_guard lock(mutex_);
    collect_locked();
  }

 private:
  Seat& sit() {
    const std::size_t start = std::hash<std::thread::id>{}(std::this_thread::get_id()) >> 4;
    for (std::size_t i = start;; ++i) {
      Seat& seat = seats_[i % kSeats];
      std::uint64_t empty = 0;
      // The exchange is a full barrier: the call loads pointers after its seat is visible. So a collector
      // that finds the seat empty ran before those loads, and frees only memory that was replaced before
      // them. An epoch that is old by the time it is stored is harmless: memory is kept a little longer.
      if (seat.since.load(std::memory_order_relaxed) == 0 &&
          seat.since.compare_exchange_strong(empty, now_.load()))
        return seat;
      if (i - start >= kSeats) std::this_thread::yield();
    }
  }

  void collect_locked() {
    std::uint64_t oldest = UINT64_MAX;
    for (const Seat& seat : seats_) {
      const std::uint64_t since = seat.since.load();
      if (since != 0 && since < oldest) oldest = since;
    }
    std::size_t kept = 0;
    for (auto& entry : retired_) {
      if (entry.first < oldest)
        entry.second();
      else
        retired_[kept++] = std::move(entry);
    }
    retired_.resize(kept);
    pending_.store(kept, std::memory_order_relaxed);
  }

  static constexpr std::size_t kSeats = 64;
  std::atomic<std::uint64_t> now_{1};
  Seat seats_[kSeats];
  std::mutex mutex_;  // guards retired_
  std::vector<std::pair<std::uint64_t, std::function<void()>>> retired_;
  std::atomic<std::size_t> pending_{0};
};

}  // namespace monolith
