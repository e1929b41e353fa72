// RowCache: the rows of a file of which memory has room for a part.
//
// A row that is not in memory is read from the disk, past the kernel's cache, so what memory this needs is
// what `stats` says. A clock with several chances decides which rows stay: a use adds two to a count of at
// most 3, the hand takes one away, and a new row starts at 0, so rows that are asked for once leave first.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "block_reader.h"

namespace monolith {

// Thread-safe.
class RowCache {
 public:
  struct Layout {
    std::string path;       // for errors
    std::uint64_t rows_at;  // where the first row begins
    std::size_t row_bytes;
  };
  struct Stats {
    std::uint64_t found = 0;      // rows that were asked for; of these
    std::uint64_t in_memory = 0;  //   without a read
    std::uint64_t reads = 0, bytes_read = 0;
    std::uint64_t bytes = 0;  // of memory
  };

  // Keeps as many rows as fit into `bytes`; reads from `descriptor`, which it duplicates. Throws
  // std::system_error.
  RowCache(int descriptor, Layout layout, std::size_t bytes, std::shared_ptr<BlockReader> reader);
  ~RowCache();
  RowCache(const RowCache&) = delete;

  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t bytes_of(std::size_t row_bytes) { return row_bytes + kRowOverhead; }
  Stats stats() const;

  // Copies a row if it is in memory.
  bool recall(std::uint32_t row, std::byte* into);
  void count(std::uint64_t found, std::uint64_t in_memory);

  struct Miss {
    RowCache* cache;
    std::uint32_t row;
    std::byte* into;
  };
  // Reads rows of one or several files, all at once, and keeps them. Reorders `misses`. Files are read in
  // whole pages, so rows in a last page that is not whole cannot be asked for. Throws FrozenDamage.
  static void fetch(std::vector<Miss>& misses);

 private:
  static constexpr std::size_t kWays = 8;
  static constexpr std::size_t kRowOverhead = sizeof(std::uint32_t) + 2;
  static constexpr std::size_t kStripes = 256;

  std::uint64_t place(std::uint32_t row) const { return layout_.rows_at + row * layout_.row_bytes; }
  std::size_t set_of(std::uint32_t row) const;
  void keep(std::uint32_t row, const std::byte* bytes);

  const Layout layout_;
  const std::shared_ptr<BlockReader> reader_;
  int descriptor_ = -1;
  std::size_t sets_;

  std::array<std::mutex, kStripes> stripes_;  // set s of what follows is guarded by s % kStripes
  std::vector<std::uint32_t> rows_;           // 1 + the row in each place; 0 is a free place
  std::vector<std::uint8_t> uses_;
  std::vector<std::uint8_t> hands_;     // by set: the place that is looked at first when a row comes
  std::unique_ptr<std::byte[]> bytes_;  // touched as rows come

  std::atomic<std::uint64_t> found_{0}, in_memory_{0}, reads_{0}, bytes_read_{0};
};

}  // namespace monolith
