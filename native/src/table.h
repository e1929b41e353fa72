// Table: int64 ids to rows.
//
// A directory leads from the leading bits of an id's hash to a partition, and a
// partition to the row. Calls are batches: ids are hashed, index lines and rows are
// prefetched well before they are needed, and many cache misses are in flight at
// once. A batch that writes is first grouped by partition, so a lock is taken per
// group, all sightings of an id meet in one place in the order they came, and the
// result does not depend on how many threads there are.
//
// Every call is safe from any thread. A row changes as a whole; a batch does not.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "admission.h"
#include "entry.h"
#include "epochs.h"
#include "memory.h"
#include "partition.h"
#include "row_record.h"
#include "touched_key_set.h"
#include "workers.h"

namespace monolith {

struct TableSpec {
  std::vector<SegmentSpec> segments;
  bool serving = false;
  ValueStorage storage;
  bool skip_zero = false;         // serving only: assigning zeros removes the row
  bool expire_when_full = false;  // past capacity_bytes the oldest rows go; otherwise new ids are refused
  std::uint64_t seed = 0;
  std::uint64_t initial_rows = 0;
  std::uint64_t capacity_bytes = 0;  // 0 is no limit
  std::int64_t expire_seconds = 0;
  std::vector<std::pair<std::uint32_t, std::int64_t>> slot_expire_seconds;
};

// When the ids of a batch were seen: one time for all, or one for each; and how often, once by default.
struct EventTimes {
  std::uint32_t all = 0;
  const std::uint32_t* each = nullptr;
  const std::uint32_t* counts = nullptr;
  std::uint32_t at(std::size_t position) const { return each != nullptr ? each[position] : all; }
  std::uint32_t count(std::size_t position) const { return counts != nullptr ? counts[position] : 1; }
  EventTimes from(std::size_t position) const {
    return {all, each != nullptr ? each + position : nullptr,
            counts != nullptr ? counts + position : nullptr};
  }
};

struct TableStats {
  std::uint64_t rows = 0, inserted = 0, filtered = 0, refused = 0, evicted = 0, removed = 0, non_finite = 0;
  std::uint64_t bytes_total = 0, bytes_rows = 0, bytes_index = 0, slots = 0, partitions = 0;
  std::int64_t max_event_time = 0;
};

// Whole rows, column by column, in the order of their hashes.
struct Chunk {
  std::size_t rows = 0;
  std::unique_ptr<std::int64_t[]> ids;
  std::unique_ptr<std::int64_t[]> times;
  std::unique_ptr<float[]> values;  // rows x dim
  std::unique_ptr<float[]> state;   // rows x state_dim
  bool done = false;
  std::uint64_t cursor = 0;  // the hash to continue from, unless done
};

class RowUses;
class TableSnapshot;
struct TableChanges;

class Table {
 public:
  explicit Table(TableSpec spec, std::shared_ptr<Admission> admission = nullptr,
                 std::shared_ptr<TouchedKeySet> touched = nullptr,
                 std::shared_ptr<Workers> workers = nullptr);
  ~Table();
  Table(const Table&) = delete;

  int dim() const { return entry_.dim(); }
  int state_dim() const { return entry_.state_dim(); }
  const Entry& entry() const { return entry_; }
  std::size_t row_bytes() const { return entry_.row_bytes(); }
  std::size_t size() const;

  // Writes dim() floats per id to `out`, zeros for an id without a row; returns how many ids have one.
  // `found`, unless null, gets 1 or 0 for each id.
  std::size_t lookup(std::span<const std::int64_t> ids, float* out, std::uint8_t* found = nullptr) const;
  // `found` may be null, and so may any of the columns.
  void lookup_rows(std::span<const std::int64_t> ids, std::uint8_t* found, std::int64_t* times, float* values,
                   float* state) const;

  void assign(std::span<const std::int64_t> ids, const float* values, EventTimes times);
  void assign_add(std::span<const std::int64_t> ids, const float* values, EventTimes times);
  // Gradients that are NaN or beyond kMaxGradient leave their rows as they are, and are counted.
  void apply_gradients(std::span<const std::int64_t> ids, const float* gradients, const float* latest,
                       std::span<const float> rates, std::int64_t step, EventTimes times, bool dedup);
  // Status per id: 1 if the row existed, 0 if it was made, -1 if the budget has no memory for it.
  void reinitialize(std::span<const std::int64_t> ids, std::uint32_t now, std::int8_t* status);
  // Writes whole rows without asking the admission filter. The optimizer state of a row is initialised if
  // there is no `state`, or if its `fresh_state` is set.
  void restore(std::span<const std::int64_t> ids, const std::uint32_t* times, const float* values,
               const float* state, const std::uint8_t* fresh_state);

  std::size_t remove(std::span<const std::int64_t> ids);
  // Moves whole rows out: copies the rows of distinct ids, then removes them; zeros for an id without a row.
  void take(std::span<const std::int64_t> ids, std::int64_t* times, float* values, float* state);
  std::size_t evict(std::int64_t now);
  // The same for rows with hashes from `cursor` on, about as many as have so many slots of the index. Sets
  // `cursor` to where to continue, 0 at the end.
  std::size_t evict_some(std::int64_t now, std::uint64_t& cursor, std::size_t slots);
  std::size_t count_expired(std::int64_t now) const;
  // Removes all rows. `rows` is how many are expected next, so that loading them need not grow the index step
  // by step.
  void clear(std::size_t rows = 0);

  // Up to `limit` rows with hashes from `cursor` to `last`. Each row is whole; a row that is there
  // throughout is met exactly once.
  Chunk scan(std::uint64_t cursor, std::uint64_t last, std::size_t limit) const;

  // Tracks from now on which rows change and which are removed, for snapshots to list; or stops. Earlier
  // changes are forgotten.
  void track_changes(bool on);

  // Adds to `set`, until untouch, each id whose row changes or is removed, after the change. Several sets may
  // be attached.
  void touch(std::shared_ptr<TouchedKeySet> set);
  void untouch(const TouchedKeySet& set);
  bool touches() const { return !touched_.empty(); }

  // For each of some buckets of ids, ascending, the sum of what row_digest says of its rows that are `number`
  // modulo `total`. Takes no lock for long: a row that changes meanwhile counts as before or as after.
  void digests(std::span<const std::int64_t> buckets, std::uint64_t number, std::uint64_t total,
               std::uint64_t* sums) const;

  // ---- for a table of which this has the hot rows (table_tier.cc); one caller at a time ----

  // Counts a use of each row there is from now on, for idle_rows; `found` gets 1 or 0 for each ID. Rows that
  // the last such call found are not idle.
  void count_uses(std::span<const std::int64_t> ids, std::uint8_t* found);
  // Copies about `count` rows that were used least, as records; their heads say whether they changed. They
  // stay until move_out.
  std::vector<std::byte> idle_rows(std::size_t count);
  // Rows that leave for another tier, and rows that come from there: no change for subscribers or snapshots.
  void move_out(std::span<const std::byte> records);
  void move_in(std::span<const std::byte> records);
  // Called once, before the first row: freed memory of the index returns to the system.
  void become_hot_tier();
  // How many new IDs get a row from now on; others are refused.
  void allow_new(std::uint64_t rows) { new_allowed_.store(static_cast<std::int64_t>(rows)); }
  // Moves rows together until there is memory for so many, or for as many as there are, and gives the rest
  // back to the system; false while a snapshot is open.
  bool shrink_to(std::size_t rows);
  // Tells subscribers and snapshots that rows are gone that were in another tier.
  void note_removals_elsewhere(const std::vector<std::uint64_t>& hashes);
  // Tells subscribers that another tier has new rows, none of them newer than `newest`.
  void note_arrivals_elsewhere(const std::vector<std::uint64_t>& hashes, std::uint32_t newest);
  bool expired(std::uint64_t hash, std::uint32_t time, std::int64_t now) const;
  // Rows that are newer than this at `now` are not expired.
  std::int64_t newest_expired(std::int64_t now) const;

  // Calls that write wait while the table is frozen. Nests.
  void freeze();
  void thaw();

  // Ids refused because the budget was spent, since the table was made. Cheap enough to read after each
  // write.
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  std::int64_t max_event_time() const { return max_event_time_.load(std::memory_order_relaxed); }
  std::vector<float> scales() const { return entry_.scales(); }
  void set_scales(const std::vector<float>& scales) { entry_.set_scales(scales); }
  TableStats stats() const;

 private:
  friend class TableSnapshot;

  // One id of a batch; `count` is its sightings, more than 1 only after merge_equal_ids.
  struct Item {
    std::uint64_t hash;
    std::uint32_t position;
    std::uint32_t count;
  };
  struct Directory;
  struct Body;
  struct Batch;
  struct Aim;
  class Writing;
  class PausedWriters;
  enum class OnAbsent { kAsk, kCreate };
  // A mask for a row's stored time before it is compared with that of a write. Training on older data does
  // not make a row older: the newest event time stays. Writing a whole row also sets its time.
  static std::uint32_t time_mask(OnAbsent absent) {
    return absent == OnAbsent::kAsk ? std::numeric_limits<std::uint32_t>::max() : 0;
  }
  // The arguments that are the same for all windows of one task.
  struct Writes {
    EventTimes times;
    OnAbsent absent;
    std::vector<std::int64_t>* touched;  // null unless a TouchedKeySet is attached
    const std::uint32_t* next;           // from one sighting of an id to the one after it
    float* scratch;
  };

  template <class Work>
  void write(std::span<const std::int64_t> ids, EventTimes times, OnAbsent absent, bool dedup,
             const Work& work);
  template <class Work>
  void write_items(Body& body, const Batch& batch, std::size_t begin, std::size_t end, EventTimes times,
                   OnAbsent absent, const Work& work);
  static bool find_rows(const Body& body, Index index, const Item* items, std::size_t count, std::size_t run,
                        std::size_t left, Slot** slots, std::byte** rows);
  template <class Work>
  std::size_t write_window(Body& body, Partition& part, const Item* items, std::size_t run, std::size_t left,
                           const Writes& writes, const Work& work);
  void admit(Body& body, Partition& part, const Item* items, std::size_t count, EventTimes times,
             OnAbsent absent, std::byte** rows, bool* fresh);
  template <class Put>
  void without_zeros(std::span<const std::int64_t> ids, const float* values, Put&& put);
  bool all_usable(const float* gradients, std::size_t count) const;
  template <class Work>
  void each_window(Body& body, const Item* items, std::size_t count, const Work& work);
  RowChange change_of(std::uint32_t row) const;
  void take_items(Body& body, const Item* items, std::size_t count, std::int64_t* times, float* values,
                  float* state);
  void group(std::span<const std::int64_t> ids, Batch& batch) const;
  // Calls run(first, last) for runs of whole groups, on all threads: an id is met by one of them only.
  template <class Run>
  void each_run(const Batch& batch, std::size_t count, Run&& run) const;
  std::size_t merge_equal_ids(Batch& batch, std::size_t first_group, std::size_t last_group,
                              EventTimes merged) const;

  void grow_for(Body& body, Partition& part, std::uint32_t new_rows, std::uint32_t time);
  bool take_chunk(Body& body, Partition& part) const;
  std::uint32_t take_row(Body& body, Partition& part);
  void free_row(Body& body, Partition& part, std::uint32_t row);
  Slot* insert(Body& body, Partition& part, std::uint64_t hash, std::uint32_t time);
  bool take_allowance() { return !hot_tier_ || new_allowed_.fetch_sub(1, std::memory_order_relaxed) > 0; }
  Index make_index(Body& body, std::size_t rows) const;  // empty; null if the budget is spent
  bool resize(Body& body, Partition& part, std::size_t rows);
  void split(Body& body, Partition& part);
  std::size_t evict_from(Body& body, const std::vector<Partition*>& parts, std::int64_t now);
  std::size_t expire_oldest(Body& body, Partition& part, std::size_t wanted, std::uint32_t time);

  bool watched() const { return snapshot_ != nullptr || changes_ != nullptr; }
  void note_change(const Body& body, Partition& part, const Slot& slot);
  void note_birth(std::uint32_t row);
  // Called after the rows are removed, so that a subscriber that reads one finds none.
  void note_removals(const std::vector<std::uint64_t>& hashes);
  bool removals_matter() const { return watched() || !touched_.empty(); }
  void touch_all(const Body& body);
  void tell_touched(std::span<const std::int64_t> ids);
  std::vector<std::int64_t> ids_between(std::uint64_t first, std::uint64_t last) const;
  void split_captured(Partition& part, Partition& sibling, std::uint64_t middle) const;
  Chunk scan_snapshot(const TableSnapshot& snapshot, std::uint64_t cursor, std::uint64_t last,
                      std::size_t limit, bool changed_only) const;

  // Copies the first `bytes` bytes of each row, zeros for an id without one, and calls done(first, count)
  // after each block of ids. `step` is the distance of two blocks in `out`.
  template <class Done>
  void read_blocks(Body& body, std::span<const std::int64_t> ids, std::byte* out, std::size_t bytes,
                   std::size_t step, std::uint8_t* found, std::uint32_t* times, Done&& done) const;
  void read_block(Body& body, const Aim& aim, std::size_t count, Aim& next_aim,
                  std::span<const std::int64_t> next, std::byte* out, std::size_t bytes, std::uint8_t* found,
                  std::uint32_t* times) const;
  template <std::size_t kBytes>
  void read_block_of(Body& body, const Aim& aim, std::size_t count, Aim& next_aim,
                     std::span<const std::int64_t> next, std::byte* out, std::size_t any_bytes,
                     std::uint8_t* found, std::uint32_t* times) const;
  void recheck_block(Body& body, std::span<const std::int64_t> ids, std::byte* out, std::size_t bytes,
                     std::uint8_t* found, std::uint32_t* times) const;
  bool read_one(Body& body, std::uint64_t hash, std::byte* out, std::size_t bytes, std::uint32_t* time) const;
  template <class Each>
  void spread(std::size_t count, std::size_t grain, Each&& each) const;
  void advance_clock(std::size_t count, EventTimes times);
  std::unique_ptr<Body> make_body(std::size_t rows) const;
  std::unique_ptr<Batch> borrow();
  void give_back(std::unique_ptr<Batch> batch);

  const TableSpec spec_;
  Entry entry_;
  const std::vector<std::byte> zeros_;     // read for an id without a row
  std::vector<std::int64_t> slot_expire_;  // by slot; empty if no slot differs
  const std::shared_ptr<Admission> admission_;
  const std::shared_ptr<Workers> workers_;
  mutable Budget budget_;
  std::atomic<Body*> body_;
  std::atomic<std::int64_t> max_event_time_{0};
  std::atomic<std::uint64_t> refused_{0};
  std::atomic<std::uint64_t> non_finite_{0};  // updates that were left out
  TableStats cleared_;  // counters of bodies that clear() dropped; guarded by gate_mutex_

  // Calls that write, counted at both ends: equal means that nothing is being changed right now.
  std::atomic<std::uint64_t> writes_begun_{0};
  std::atomic<std::uint64_t> writes_ended_{0};

  // The gate for calls that write: freeze(), clear() and PausedWriters close it and wait until writers_ is 0.
  mutable std::mutex gate_mutex_;  // guards writers_, frozen_ and cleared_
  std::condition_variable gate_changed_;
  int writers_ = 0;
  int frozen_ = 0;

  // Changed only while writers are paused, so a writer reads them without a lock.
  std::vector<std::shared_ptr<TouchedKeySet>> touched_;
  TableSnapshot* snapshot_ = nullptr;
  std::unique_ptr<TableChanges> changes_;

  std::unique_ptr<RowUses> uses_;  // of one caller at a time; null unless this is a hot tier
  bool hot_tier_ = false;
  std::atomic<std::int64_t> new_allowed_{std::numeric_limits<std::int64_t>::max()};  // of a hot tier
  double hand_ = 0;  // the share of each index that the search for idle rows is through with

  std::mutex batches_mutex_;                     // guards batches_
  std::vector<std::unique_ptr<Batch>> batches_;  // scratch of earlier calls, for the next ones
  mutable Epochs epochs_;
};

}  // namespace monolith
