// TableSnapshot: a table as it was at one moment, while training continues.
//
// Copy on write, row by row. Opening a snapshot costs nothing that grows with the table. A writer
// copies a row to the snapshot before its first change:
//
//   row not copied   bit clear in taken_   the table's own memory has the row as it was
//   row copied       bit set in taken_     CapturedRows of its partition has it
//   row made later   bit set in taken_     not part of the snapshot
//
// Invariant: bit, copy and change of a row happen under the lock of its partition, in this order. A
// scan that holds this lock and finds the bit clear may therefore read the row in place.
//
// If the table tracks changes, a snapshot also lists the rows that changed since the previous snapshot
// and the removed ids.
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

// Rows of one partition as they were at the snapshot, copied before they changed. Guarded by the partition's
// mutex.
struct CapturedRows {
  struct Key {
    std::uint64_t hash;
    std::uint32_t row;  // its number then
    std::uint32_t time;
  };
  std::vector<Key> keys;
  std::vector<std::byte> bytes;  // a row each, in the order of the keys
};

// The changes of a table since its previous snapshot.
struct TableChanges {
  RowBits rows;
  std::mutex mutex;                    // guards removed and cleared
  std::vector<std::uint64_t> removed;  // hashes
  bool cleared = false;                // everything from before is gone

  void remove(const std::vector<std::uint64_t>& hashes) {
    std::lock_guard lock(mutex);
    removed.insert(removed.end(), hashes.begin(), hashes.end());
  }
};

// Thread-safe. One at a time per table; the table must outlive it.
class TableSnapshot {
 public:
  // Pauses writers while it opens, not longer.
  explicit TableSnapshot(Table& table);
  // As by close(false).
  ~TableSnapshot();
  TableSnapshot(const TableSnapshot&) = delete;

  std::size_t rows() const { return stats_.rows; }
  std::int64_t max_event_time() const { return stats_.max_event_time; }
  const std::vector<float>& scales() const { return scales_; }
  std::size_t captured_bytes() const { return captured_bytes_.load(std::memory_order_relaxed); }

  int dim() const { return table_.dim(); }
  int state_dim() const { return table_.state_dim(); }

  // As Table::scan. With `changed_only`, only rows that changed since the previous snapshot.
  Chunk scan(std::uint64_t cursor, std::uint64_t last, std::size_t limit, bool changed_only) const;

  // Ids removed since the previous snapshot, some of which may have a row again, and whether the table was
  // cleared.
  std::vector<std::int64_t> removed() const;
  bool cleared() const { return changes_ != nullptr && changes_->cleared; }
  bool tracked() const { return changes_ != nullptr; }

  // Frees the copies. If `saved`, the changes up to the snapshot count as saved; otherwise the next snapshot
  // lists them again. A second close does nothing.
  void close(bool saved);

 private:
  friend class Table;

  Table& table_;
  TableStats stats_;
  std::vector<float> scales_;
  RowBits taken_;  // rows that were copied, or are not part of the snapshot
  std::unique_ptr<TableChanges> changes_;
  std::atomic<std::size_t> captured_bytes_{0};
  std::atomic<bool> open_{true};
};

}  // namespace monolith
