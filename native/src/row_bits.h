// RowBits: one bit per row of a table, by row number.
//
// Laid out as the arenas are: rows never move, so a bit outlives splits and
// resizes of the index. Memory comes with the first bit of an arena and pages of it
// when they are touched, so an empty set of any size costs nothing to make.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace monolith {

class RowBits {
 public:
  RowBits() = default;
  RowBits(const RowBits&) = delete;
  ~RowBits() {
    for (auto& words : words_) std::free(words.load());
  }

  // Whether the bit was set before. Safe from any thread.
  bool set(std::uint32_t row) {
    const int arena = 31 - std::countl_zero(row);
    std::uint64_t* words = words_[arena].load(std::memory_order_acquire);
    if (words == nullptr) words = make(arena);
    std::uint64_t& word = words[word_of(row, arena)];
    const std::uint64_t bit = std::uint64_t{1} << (row % 64);
    if ((__atomic_load_n(&word, __ATOMIC_RELAXED) & bit) != 0) return true;
    return (__atomic_fetch_or(&word, bit, __ATOMIC_RELAXED) & bit) != 0;
  }

  bool test(std::uint32_t row) const {
    const int arena = 31 - std::countl_zero(row);
    const std::uint64_t* words = words_[arena].load(std::memory_order_acquire);
    return words != nullptr &&
           (__atomic_load_n(&words[word_of(row, arena)], __ATOMIC_RELAXED) >> (row % 64) & 1) != 0;
  }

  void reset(std::uint32_t row) {
    const int arena = 31 - std::countl_zero(row);
    std::uint64_t* words = words_[arena].load(std::memory_order_acquire);
    if (words != nullptr)
      __atomic_fetch_and(&words[word_of(row, arena)], ~(std::uint64_t{1} << (row % 64)), __ATOMIC_RELAXED);
  }

  // Sets every bit that is set in `other`, which no thread changes meanwhile.
  void add(const RowBits& other) {
    for (int arena = kFirst; arena < 32; ++arena) {
      const std::uint64_t* from = other.words_[arena].load(std::memory_order_acquire);
      if (from == nullptr) continue;
      std::uint64_t* words = words_[arena].load(std::memory_order_acquire);
      if (words == nullptr) words = make(arena);
      for (std::size_t i = 0; i < count(arena); ++i)
        if (from[i] != 0) __atomic_fetch_or(&words[i], from[i], __ATOMIC_RELAXED);
    }
  }

 private:
  static constexpr int kFirst = 6;  // rows begin at 64
  static std::size_t count(int arena) { return std::size_t{1} << (arena - kFirst); }
  static std::size_t word_of(std::uint32_t row, int arena) { return (row - (1u << arena)) / 64; }

  std::uint64_t* make(int arena) {
    std::lock_guard lock(mutex_);
    std::uint64_t* words = words_[arena].load(std::memory_order_relaxed);
    if (words == nullptr) {
      words = static_cast<std::uint64_t*>(std::calloc(count(arena), sizeof(std::uint64_t)));
      if (words == nullptr) throw std::bad_alloc();
      words_[arena].store(words, std::memory_order_release);
    }
    return words;
  }

  std::atomic<std::uint64_t*> words_[32]{};
  std::mutex mutex_;  // guards making words
};

}  // namespace monolith
