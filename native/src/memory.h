// Memory: a byte budget, arenas for rows and a heap for index arrays.
//
// Both come from mapped regions that ask for huge pages once they are large: a
// random read then costs one cache miss, not a page walk on top of it. Pages are
// committed when first touched, so a small table stays small.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace monolith {

// Lets malloc keep what is freed, in place of giving it back to the system. For a process that needs the same
// blocks for every batch: pages that are mapped and unmapped again and again cost more than the work on them,
// and threads wait for each other there. Does nothing without glibc.
void keep_freed_memory();

// Counts the bytes of one table, and says no past the limit.
class Budget {
 public:
  explicit Budget(std::size_t limit) : limit_(limit) {}  // 0 is no limit

  bool take(std::size_t bytes) {
    const std::size_t before = used_.fetch_add(bytes, std::memory_order_relaxed);
    const std::size_t limit = limit_.load(std::memory_order_relaxed);
    if (limit != 0 && before + bytes > limit) {
      used_.fetch_sub(bytes, std::memory_order_relaxed);
      return false;
    }
    return true;
  }
  void give(std::size_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  std::size_t used() const { return used_.load(std::memory_order_relaxed); }

  // Bytes that are about to be given back, and do not count until then.
  void lend(std::size_t bytes) {
    if (limit_.load(std::memory_order_relaxed) != 0) limit_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void take_back(std::size_t bytes) {
    if (limit_.load(std::memory_order_relaxed) != 0) limit_.fetch_sub(bytes, std::memory_order_relaxed);
  }

  // Lends `bytes` for a while: takes them back at its end, unless told that another will.
  class Loan {
   public:
    Loan(Budget& budget, std::size_t bytes) : budget_(budget), bytes_(bytes) { budget_.lend(bytes_); }
    ~Loan() {
      if (!handed_over_) budget_.take_back(bytes_);
    }
    Loan(const Loan&) = delete;
    void hand_over() { handed_over_ = true; }
    std::size_t bytes() const { return bytes_; }

   private:
    Budget& budget_;
    const std::size_t bytes_;
    bool handed_over_ = false;
  };

 private:
  std::atomic<std::size_t> limit_;
  std::atomic<std::size_t> used_{0};
};

// A zeroed, page-aligned mapping; from 2 MiB on it is aligned to and asks for huge pages.
class Region {
 public:
  explicit Region(std::size_t bytes);
  ~Region();
  Region(Region&& other) noexcept;
  Region(const Region&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Rows of one size, allocated in chunks of at least 64 and never moved.
//
// Arena k holds rows 2^(k+6) .. 2^(k+7)-1, so an address is a shift, a table of a few pointers that
// stays in cache, and a multiply. Row numbers begin at 64: number 0 means "no row".
class RowArenas {
 public:
  static constexpr std::uint32_t kChunkRows = 64;

  RowArenas(std::size_t row_bytes, Budget& budget);
  ~RowArenas() { budget_.give(bytes()); }

  // Where rows are, by number; in a loop everything it needs stays in registers.
  class Finder {
   public:
    explicit Finder(const RowArenas& rows) : origins_(rows.origins_), row_bytes_(rows.row_bytes_) {}
    std::byte* operator()(std::uint32_t number) const {
      return origins_[std::countl_zero(number | 1u)].load(std::memory_order_relaxed) + number * row_bytes_;
    }

   private:
    const std::atomic<std::byte*>* const origins_;
    const std::size_t row_bytes_;
  };

  std::byte* row(std::uint32_t number) const { return Finder(*this)(number); }

  struct Range {
    std::uint32_t first = 0;  // 0 when the budget is spent
    std::uint32_t end = 0;
  };
  // Takes the next rows: `wanted`, a multiple of 64, or fewer at the end of an arena or of the budget.
  Range take(std::uint32_t wanted);
  // The first row that was never taken.
  std::uint32_t end() const;
  // Gives back the memory of all rows from `first` on, a multiple of 64. None is in use; a reader that still
  // looks at one, and will find out that it should not have, reads anything.
  void release_from(std::uint32_t first);

  std::size_t bytes() const { return taken_.load(std::memory_order_relaxed); }

 private:
  const std::size_t row_bytes_;
  Budget& budget_;
  std::atomic<std::byte*> origins_[32];  // where row 0 of each arena would be, the last arena's first
  std::atomic<std::size_t> taken_{0};
  mutable std::mutex mutex_;  // guards next_ and regions_
  std::uint64_t next_ = kChunkRows;
  std::vector<Region> regions_;
};

// Zeroed index arrays of any size. Those of a large table are carved in units of 32 KiB from shared regions,
// so that arrays of every size rest on huge pages and free neighbours merge; those of a small one come from
// the allocator, which knows best how to reuse what a growing array leaves behind.
class IndexHeap {
 public:
  explicit IndexHeap(Budget& budget) : budget_(budget) {}
  ~IndexHeap();

  // What is freed returns to the system from now on, at the price of page faults for what is allocated
  // next. For a table that shrinks; called before it is large.
  void give_back_freed() { gives_back_ = true; }
  // The size that `bytes` will really take; all of it can be used.
  static std::size_t rounded(std::size_t bytes) { return bytes < kUnit ? bytes : units(bytes); }
  void* allocate(std::size_t bytes);  // nullptr when the budget is spent
  void free(void* array, std::size_t bytes);
  std::size_t bytes() const { return taken_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kUnit = 32 << 10;
  static constexpr std::size_t kLarge = 4 << 20;  // from here on the table counts as large
  static std::size_t units(std::size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

  Budget& budget_;
  bool gives_back_ = false;
  std::atomic<std::size_t> taken_{0};        // with the free ranges, unless those are given back
  std::mutex mutex_;                         // guards what follows
  std::map<std::byte*, Region> regions_;     // by address
  std::map<std::byte*, std::size_t> holes_;  // free ranges by address, neighbours merged
};

}  // namespace monolith
