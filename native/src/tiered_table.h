// TieredTable: a table with its hot rows in memory and all others in files.
//
// A row is in one place: in the hot table, or in the cold store. A batch that is written first has its cold
// rows moved in, with their optimizer state and times; the rows that were used least make room for them. So
// everything that changes a row is done by the hot table, which knows nothing of files. Looking up moves
// nothing: a cold row is read, and kept for a while, since training is likely to write it next.
//
//   count_missing(ids) -> spill(..) until there is room -> bring() -> a write of the hot table
//
// What changes which rows are where is called by one thread at a time; lookups, scans and digests by any. A
// row that moves is put into its new tier before it leaves the old one. A reader looks first in the hot tier,
// then in the cold one, so it can only miss a row that moved in after it looked: then it looks again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cold_store.h"
#include "table.h"

namespace monolith {

struct TieredSpec {
  std::uint64_t memory_bytes = 0;   // for hot rows, the index of cold ones, and buffers
  std::uint64_t most_hot_rows = 0;  // fewer than memory_bytes allows; 0 for as many as that
};

// What a table of so many rows takes, reckoned without one.
struct TierSizes {
  TierSizes(std::size_t row_bytes, std::uint64_t memory_bytes, std::size_t buffer_bytes,
            std::size_t recent_bytes, std::uint64_t rows);

  std::uint64_t hot_rows;      // that fit into the memory
  std::uint64_t hot_bytes;     // of memory, of a hot row with all that belongs to it
  std::uint64_t index_bytes;   // of memory, for the cold rows
  std::uint64_t record_bytes;  // of a row in a file, without its part of blocks and directory
  std::uint64_t block_bytes;   // of one read
  double file_bytes;           // of a row in a file, with both
};

class TieredTable {
 public:
  TieredTable(std::shared_ptr<Table> hot, const TieredSpec& spec, ColdSpec cold,
              std::shared_ptr<BlockReader> reader);

  // As those of Table.
  void lookup(std::span<const std::int64_t> ids, float* out);
  void lookup_rows(std::span<const std::int64_t> ids, std::uint8_t* found, std::int64_t* times, float* values,
                   float* state);
  // About as many, where rows move meanwhile.
  std::size_t count_expired(std::int64_t now);
  std::size_t remove(std::span<const std::int64_t> ids);  // moves no cold row in
  void digests(std::span<const std::int64_t> buckets, std::uint64_t number, std::uint64_t total,
               std::uint64_t* sums);
  void clear(std::size_t rows);

  // Rows expire a part at a time, so that writers come in between: find_expired() looks for the next part
  // while others write, and is false at the end; drop_expired() removes it.
  class Expiry;
  bool find_expired(Expiry& expiry);
  std::size_t drop_expired(Expiry& expiry);

  // Notes the IDs of a batch that is to be written; returns how many distinct ones have no hot row.
  std::size_t count_missing(std::span<const std::int64_t> ids);
  // Moves some hot rows out, unless there is room for so many more; returns how many are still too many. Rows
  // of the batch stay.
  std::size_t spill(std::size_t incoming);
  // Moves the cold rows of the batch in; returns how many of its IDs have no row. New IDs leave room in the
  // index for the rows that are elsewhere, in a table above this one, and may come here.
  std::size_t bring(std::uint64_t elsewhere = 0);
  // The index of cold rows has grown, or what lookups read: the hot table gives memory back for it.
  bool must_shrink() const;
  void shrink();

  // Cold rows with hashes from `cursor` to `last`, as Table::scan. `changed_only` is for snapshots.
  // With `unlinked`, those of the snapshot that are in no file of links().
  Chunk scan_cold(std::uint64_t cursor, std::uint64_t last, std::size_t limit, bool of_snapshot,
                  bool changed_only, bool unlinked = false);
  std::size_t cold_rows() const { return cold_.size(); }

  void track_changes(bool on);
  // The cold half of a snapshot; that of the hot table is opened and closed with it, while nothing is
  // written.
  std::size_t open_snapshot();
  void close_snapshot(bool saved);
  // See ColdStore.
  std::vector<ColdLink> links() { return cold_.links(); }
  std::size_t adopt(const std::string& path, std::span<const std::uint8_t> alive);
  std::uint64_t adopted() const { return adopted_.load(std::memory_order_relaxed); }

  bool wait_for_room(double seconds) { return cold_.wait_for_room(seconds); }
  std::string trouble() const { return cold_.trouble(); }
  void flush() { cold_.flush(); }

  int dim() const { return hot_->dim(); }
  int state_dim() const { return hot_->state_dim(); }
  Table& hot() { return *hot_; }
  std::uint64_t hot_rows_allowed() const { return room().rows; }
  // Rows of both tiers for which the memory has an index; new IDs beyond them are refused.
  std::uint64_t most_rows() const { return most_rows_; }
  std::uint64_t evicted() const { return evicted_.load(std::memory_order_relaxed); }
  std::uint64_t removed() const { return removed_.load(std::memory_order_relaxed); }
  ColdStats stats() const { return cold_.stats(); }
  // Memory of everything but the hot table's rows and index.
  std::uint64_t cold_memory_bytes() const;

 private:
  struct Found;
  template <class Use>
  void each_cold(std::span<const std::int64_t> ids, std::span<const std::uint8_t> hot, bool remember,
                 const Use& use);
  // How many rows may be hot, for how many there is memory, and how many bytes too many are in use.
  struct Room {
    std::uint64_t rows = 0, held = 0, over = 0;
  };
  Room room() const;
  std::size_t move_out(std::size_t count);
  void follow_lookups();
  std::uint64_t memory_limit() const;
  std::uint32_t epoch_of(std::uint32_t change) const;
  std::uint32_t change_of(std::uint32_t epoch) const;

  const std::shared_ptr<Table> hot_;
  const TieredSpec spec_;
  const std::size_t row_cost_;  // bytes of a hot row with all that belongs to it
  std::uint64_t index_bytes_;   // for the index of cold rows, at most
  std::uint64_t most_rows_;
  ColdStore cold_;
  std::atomic<std::uint64_t> recent_bytes_;  // for rows that lookups read
  std::atomic<bool> shrinks_{false};
  std::atomic<std::uint64_t> moved_in_{0};  // calls that moved rows in
  std::atomic<std::uint64_t> evicted_{0};   // cold rows
  std::atomic<std::uint64_t> removed_{0};   // cold rows
  std::atomic<std::uint64_t> adopted_{0};

  std::uint64_t lately_ = 0;            // rows that are read between two writes
  std::vector<std::uint64_t> missing_;  // hashes of the batch that is to be written

  // A snapshot ends an epoch. A record of a file has the epoch in which its row changed last, or 0 if it had
  // not changed since the last one that was saved when it was written.
  std::atomic<bool> tracked_{false};
  std::atomic<bool> snapshot_open_{false};
  std::atomic<std::uint32_t> epoch_{1};
  std::atomic<std::uint32_t> saved_{0};  // changes up to this epoch are saved
};

class TieredTable::Expiry {
 public:
  Expiry(const TieredTable& table, std::int64_t now);

 private:
  friend class TieredTable;
  const std::int64_t now_;
  bool hot_ = true;                          // first come hot rows,
  std::uint64_t cursor_ = 0;                 // with hashes from this on
  std::optional<ColdStore::HeadWalk> walk_;  // none if all rows are newer
  std::vector<std::uint32_t> positions_;     // of expired rows in the part it is at
};

}  // namespace monolith
