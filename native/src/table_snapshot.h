// TableCut: a table as it was at one moment, while it goes on being trained.
//
// Opening a cut costs nothing that grows with the table. From then on whoever is about
// to change a row for the first time copies it aside; reading the cut takes those copies
// in place of the rows. A row that nobody touched is read where it lies.
//
// A cut also knows which rows changed since the cut before, and which ids were removed,
// where the table keeps track of that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "row_bits.h"
#include "table.h"

namespace monolith {

// Rows of one partition as they were at the cut, copied before they changed. Guarded by its mutex.
struct CapturedRows {
  struct Key {
    std::uint64_t hash;
    std::uint32_t row;  // its number then
    std::uint32_t time;
  };
  std::vector<Key> keys;
  std::vector<std::byte> bytes;  // a row each, in the order of the keys
};

// What happened to a table since some moment.
struct TableChanges {
  RowBits rows;
  std::mutex mutex;                    // guards what follows
  std::vector<std::uint64_t> removed;  // hashes
  bool cleared = false;                // everything from before is gone

  void remove(const std::vector<std::uint64_t>& hashes) {
    std::lock_guard lock(mutex);
    removed.insert(removed.end(), hashes.begin(), hashes.end());
  }
};

// Thread-safe. One at a time per table; the table must outlive it.
class TableCut {
 public:
  // Holds writers off while it is opened, not longer.
  explicit TableCut(Table& table);
  // As by close(false).
  ~TableCut();
  TableCut(const TableCut&) = delete;

  std::size_t rows() const { return stats_.rows; }
  std::int64_t max_event_time() const { return stats_.max_event_time; }
  const std::vector<float>& scales() const { return scales_; }
  std::size_t captured_bytes() const { return captured_bytes_.load(std::memory_order_relaxed); }

  int dim() const { return table_.dim(); }
  int state_dim() const { return table_.state_dim(); }

  // As Table::scan. With `changed_only`, rows that changed since the cut before.
  Chunk scan(std::uint64_t cursor, std::uint64_t last, std::size_t limit, bool changed_only) const;

  // Ids removed since the cut before; they may have come back since. And whether the table was cleared.
  std::vector<std::int64_t> removed() const;
  bool cleared() const { return changes_ != nullptr && changes_->cleared; }
  bool tracked() const { return changes_ != nullptr; }

  // Lets the copies go. What changed up to the cut counts as saved, or again as changed. Closing again does
  // nothing.
  void close(bool saved);

 private:
  friend class Table;

  Table& table_;
  TableStats stats_;
  std::vector<float> scales_;
  RowBits taken_;  // rows that were copied, or are not of the cut
  std::unique_ptr<TableChanges> changes_;
  std::atomic<std::size_t> captured_bytes_{0};
  std::atomic<bool> open_{true};
};

}  // namespace monolith
