// The table itself: how it is made, grows, forgets and is walked.
#include "table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>

#include "prefetch.h"
#include "row_uses.h"
#include "table_body.h"
#include "table_snapshot.h"

namespace monolith {
namespace {

// Where a range of hashes splits. The first splits are uneven, so that partitions reach their limit at
// different times: at any moment some are large and some have just split, index arrays given back by one are
// taken by the next, and memory grows smoothly. Once a range is below 12/64 of all hashes it is halved.
std::uint64_t middle_of(std::uint64_t first, std::uint64_t last) {
  constexpr std::uint64_t kUnit = std::uint64_t{1} << 58;
  const std::uint64_t units = (last - first) / kUnit + 1;
  return first + (units >= 12 ? units * 15 / 32 * kUnit : (last - first) / 2 + 1);
}

}  // namespace

Partition::Partition() = default;
Partition::~Partition() = default;

Table::Table(TableSpec spec, std::shared_ptr<Admission> admission, std::shared_ptr<TouchedKeySet> touched,
             std::shared_ptr<Workers> workers)
    : spec_(std::move(spec)),
      entry_(spec_.segments, spec_.serving, spec_.seed, spec_.storage),
      zeros_(entry_.row_bytes()),
      admission_(std::move(admission)),
      workers_(std::move(workers)),
      budget_(spec_.capacity_bytes) {
  if (touched != nullptr) touched_.push_back(std::move(touched));
  if (spec_.skip_zero && !spec_.serving)
    throw std::invalid_argument("table: skip_zero is for serving tables");
  if (!spec_.slot_expire_seconds.empty()) {
    slot_expire_.assign(kMaxSlots, spec_.expire_seconds);
    for (const auto& [slot, seconds] : spec_.slot_expire_seconds) {
      if (slot >= kMaxSlots) throw std::invalid_argument("table: slot should be less than 32768");
      slot_expire_[slot] = seconds;
    }
  }
  body_ = make_body(spec_.initial_rows).release();
}

Table::~Table() {
  epochs_.drain();
  delete body_.load();
}

std::unique_ptr<Table::Body> Table::make_body(std::size_t expected) const {
  auto body = std::make_unique<Body>(entry_.row_bytes(), budget_);
  if (hot_tier_) body->heap.give_back_freed();
  const auto add = [&](std::uint64_t first, std::uint64_t last, double rows) {
    auto part = std::make_unique<Partition>();
    part->split_at = kPartitionRows;
    part->first = first;
    part->last = last;
    const Index index = make_index(*body, static_cast<std::size_t>(rows));
    if (index.slots() == nullptr)
      throw std::invalid_argument("table: capacity_bytes is too small for initial_rows, or memory is short");
    part->index = index;
    body->partitions.push_back(std::move(part));
  };
  // Partitions for initial_rows, as splits would have left them.
  int depth = 0;
  const auto build = [&](const auto& self, std::uint64_t first, std::uint64_t last) -> void {
    const double fraction = (static_cast<double>(last - first) + 1) * 0x1p-64;
    const double rows = fraction * static_cast<double>(expected);
    if (rows <= partition_limit(expected / kPartitionRows) * 0.95) {
      add(first, last, rows);
      return;
    }
    const std::uint64_t middle = middle_of(first, last);
    depth = std::max(depth, 64 - std::countr_zero(middle));
    self(self, first, middle - 1);
    self(self, middle, last);
  };
  build(build, 0, ~std::uint64_t{0});
  auto directory = std::make_unique<Directory>(depth);
  for (auto& part : body->partitions) directory->point(*part);
  body->directory = directory.release();
  return body;
}

std::size_t Table::size() const {
  return stats().rows;
}

TableStats Table::stats() const {
  TableStats total;
  {
    std::lock_guard lock(gate_mutex_);
    total = cleared_;
  }
  Epochs::Visit visit(epochs_);
  Body& body = *body_.load();
  std::vector<Partition*> parts;
  {
    std::lock_guard lock(body.mutex);
    for (const auto& part : body.partitions) parts.push_back(part.get());
  }
  for (Partition* part : parts) {
    std::lock_guard lock(part->mutex);
    total.rows += part->rows;
    total.inserted += part->inserted;
    total.filtered += part->filtered;
    total.refused += part->refused;
    total.evicted += part->evicted;
    total.removed += part->removed;
    total.slots += part->index.load(std::memory_order_relaxed).size();
  }
  total.partitions = parts.size();
  total.bytes_rows = body.rows.bytes();
  total.bytes_index = body.heap.bytes() + parts.size() * sizeof(Partition) + body.directory.load()->bytes();
  total.bytes_total = total.bytes_rows + total.bytes_index;
  total.max_event_time = max_event_time();
  total.non_finite = non_finite_.load(std::memory_order_relaxed);
  return total;
}

void Table::clear(std::size_t rows) {
  // The budget of a full table has no memory left for its successor, so it lends the successor as much as the
  // table itself uses, until that is freed.
  Budget::Loan lent(budget_, budget_.used());
  std::unique_ptr<Body> fresh = make_body(
      spec_.capacity_bytes != 0 ? spec_.initial_rows : std::max<std::size_t>(rows, spec_.initial_rows));
  {
    // All that can fail comes before the new body is in place: a clear() that throws has changed nothing.
    const PausedWriters paused(*this, PausedWriters::kAlone);
    if (snapshot_ != nullptr)
      throw std::invalid_argument("clear: a snapshot of this table is open; close it first");
    auto changes = changes_ != nullptr ? std::make_unique<TableChanges>() : nullptr;
    const TableStats kept = stats();
    Body* old = body_.load();
    touch_all(*old);
    std::function<void()> free = [this, old, bytes = lent.bytes()] {
      delete old;
      budget_.take_back(bytes);
    };
    epochs_.reserve_one();  // only writers and clear() retire memory, and writers are paused

    body_.store(fresh.release());
    epochs_.retire_reserved(std::move(free));
    lent.hand_over();
    if (changes != nullptr) {
      changes->cleared = true;
      changes_ = std::move(changes);
    }
    std::lock_guard lock(gate_mutex_);
    cleared_ = {};
    cleared_.inserted = kept.inserted;
    cleared_.filtered = kept.filtered;
    cleared_.refused = kept.refused;
    cleared_.evicted = kept.evicted;
    cleared_.removed = kept.removed;
    max_event_time_ = 0;
    entry_.forget_steps();
  }
  epochs_.collect();  // after writers resumed: freeing many rows takes a while
}

void Table::freeze() {
  std::unique_lock lock(gate_mutex_);
  ++frozen_;
  gate_changed_.wait(lock, [&] { return writers_ == 0; });
}

void Table::thaw() {
  std::lock_guard lock(gate_mutex_);
  if (frozen_ == 0) throw std::invalid_argument("table: thaw without freeze");
  if (--frozen_ == 0) gate_changed_.notify_all();
}

// ---- rows ----------------------------------------------------------------------------------------

// The larger the partition, the larger its chunks, so that they are seldom taken; of a partition that is not
// small, less than a hundredth is unused.
bool Table::take_chunk(Body& body, Partition& part) const {
  const std::uint32_t wanted = std::bit_floor(std::clamp(part.rows / 128, RowArenas::kChunkRows, 1024u));
  const RowArenas::Range chunk = body.rows.take(wanted);
  part.chunk_next = chunk.first;
  part.chunk_end = chunk.end;
  return chunk.first != 0;
}

// A free row's first bytes hold the number of the next free row. Readers may still copy such a row: the
// version of the partition tells them that it changed. 0 is the end of the list, and no row.
std::uint32_t Table::take_row(Body& body, Partition& part) {
  if (part.free_rows != 0) {
    const std::uint32_t row = part.free_rows;
    std::memcpy(&part.free_rows, body.rows.row(row), sizeof(part.free_rows));
    // The next one is known only now. A batch of new ids would wait for each of them.
    if (part.free_rows != 0) __builtin_prefetch(body.rows.row(part.free_rows), 1);
    --part.free_count;
    return row;
  }
  if (part.chunk_next == part.chunk_end && !take_chunk(body, part)) return 0;
  return part.chunk_next++;
}

void Table::free_row(Body& body, Partition& part, std::uint32_t row) {
  std::memcpy(body.rows.row(row), &part.free_rows, sizeof(part.free_rows));
  part.free_rows = row;
  ++part.free_count;
}

Slot* Table::insert(Body& body, Partition& part, std::uint64_t hash, std::uint32_t time) {
  const Index index = part.index.load(std::memory_order_relaxed);
  if (part.rows + 1 > static_cast<std::size_t>(static_cast<double>(index.size()) * kBrimLoad)) return nullptr;
  const std::uint32_t row = take_row(body, part);
  if (row == 0) return nullptr;
  ++part.rows;
  ++part.inserted;
  if (watched()) note_birth(row);
  return index.place(hash, row, time);
}

// ---- growth --------------------------------------------------------------------------------------

Index Table::make_index(Body& body, std::size_t rows) const {
  const auto slots = static_cast<std::size_t>(static_cast<double>(rows) / kFreshLoad) + 16;
  const std::size_t bytes = IndexHeap::rounded((slots + kBucketSlots - 1) / kBucketSlots * Index::bytes(1));
  const std::size_t buckets = bytes / Index::bytes(1);
  if (buckets > Index::kMaxBuckets) return {};
  auto* array = static_cast<Slot*>(body.heap.allocate(bytes));
  return array != nullptr ? Index(array, static_cast<std::uint32_t>(buckets)) : Index();
}

// Replaces the index of a partition by one for `rows` rows; false if the budget has no memory for it. Rows
// stay where they are. The new index is complete before it is published, and a reader that already has the
// old one finds the same rows there until it is freed: it is retired, and counts towards the budget until
// then.
bool Table::resize(Body& body, Partition& part, std::size_t rows) {
  const Index fresh = make_index(body, rows);
  if (fresh.slots() == nullptr) return false;
  const Index old = part.index.load(std::memory_order_relaxed);
  const Slot* slot = old.slots();
  for (std::size_t i = 0; i < old.size(); ++i)
    if (slot[i].row != 0) fresh.place(slot[i].hash, slot[i].row, slot[i].time);
  part.index.store(fresh, std::memory_order_release);
  {
    std::lock_guard lock(body.mutex);
    body.directory.load()->point(part);
  }
  epochs_.retire([&heap = body.heap, old] { heap.free(old.slots(), old.bytes()); });
  return true;
}

// Makes the index and the free rows of a partition large enough for `new_rows` more rows, or expires the
// oldest ones if the budget is spent and the table may. Called with the partition locked and a Change begun.
// If neither helps, insert() refuses the ids.
void Table::grow_for(Body& body, Partition& part, std::uint32_t new_rows, std::uint32_t time) {
  const std::size_t wanted = std::size_t{part.rows} + new_rows;
  const Index index = part.index.load(std::memory_order_relaxed);
  bool full = false;
  if (static_cast<double>(wanted) > static_cast<double>(index.size()) * kFullLoad)
    full = !resize(body, part, wanted) &&
           static_cast<double>(wanted) > static_cast<double>(index.size()) * kBrimLoad;
  const std::uint32_t left = part.chunk_end - part.chunk_next;
  if (!full && part.free_count + left < new_rows) {
    for (; part.chunk_next < part.chunk_end; ++part.chunk_next) free_row(body, part, part.chunk_next);
    full = !take_chunk(body, part);
  }
  if (full && spec_.expire_when_full)
    expire_oldest(body, part, std::max<std::size_t>(new_rows, part.rows / 32), time);
}

// Splits a partition that has grown past its limit. Called with the partition locked, between windows.
//
// Readers take no lock, so the order of the stores matters:
//   1. both new indexes are complete before either is published;
//   2. the version is odd (Change) from before the range shrinks until the directory leads to the sibling: a
//      reader that comes in between retries;
//   3. the old index is retired, not freed: a reader may still be probing it.
void Table::split(Body& body, Partition& part) {
  {
    std::lock_guard lock(body.mutex);
    part.split_at = std::max(part.split_at, partition_limit(body.partitions.size()));
  }
  if (part.rows <= part.split_at) return;
  const Index old = part.index.load(std::memory_order_relaxed);
  const std::uint64_t middle = middle_of(part.first, part.last);
  const int depth = 64 - std::countr_zero(middle);  // leading bits that tell the two sides apart
  std::size_t upper = 0;
  const Slot* slot = old.slots();
  for (std::size_t i = 0; i < old.size(); ++i) upper += slot[i].row != 0 && slot[i].hash >= middle;

  const Index low = make_index(body, part.rows - upper);
  const Index high = make_index(body, upper);
  if (low.slots() == nullptr || high.slots() == nullptr) {  // no budget: stay large
    for (const Index index : {low, high})
      if (index.slots() != nullptr) body.heap.free(index.slots(), index.bytes());
    part.split_at = part.rows + part.rows / 4;
    return;
  }
  for (std::size_t i = 0; i < old.size(); ++i)
    if (slot[i].row != 0)
      (slot[i].hash >= middle ? high : low).place(slot[i].hash, slot[i].row, slot[i].time);

  auto sibling = std::make_unique<Partition>();
  sibling->first = middle;
  sibling->last = part.last.load();
  sibling->rows = static_cast<std::uint32_t>(upper);
  sibling->index = high;
  sibling->split_at = part.split_at;
  split_captured(part, *sibling, middle);

  Change change(part);
  part.last.store(middle - 1, std::memory_order_relaxed);
  part.index.store(low, std::memory_order_release);
  part.rows -= static_cast<std::uint32_t>(upper);
  {
    std::lock_guard lock(body.mutex);
    Directory* directory = body.directory.load();
    if (depth > directory->depth) {
      auto* deeper = new Directory(depth);
      for (std::size_t i = 0; i < deeper->size(); ++i) {
        const std::size_t from = i >> (depth - directory->depth);
        deeper->indexes[i] = directory->indexes[from].load();
        deeper->partitions[i] = directory->partitions[from].load();
      }
      body.directory.store(deeper, std::memory_order_release);
      epochs_.retire([directory] { delete directory; });
      directory = deeper;
    }
    directory->point(part);
    directory->point(*sibling);
    body.partitions.push_back(std::move(sibling));
  }
  epochs_.retire([&heap = body.heap, old] { heap.free(old.slots(), old.bytes()); });
}

// ---- forgetting ----------------------------------------------------------------------------------

bool Table::expired(std::uint64_t hash, std::uint32_t time, std::int64_t now) const {
  const std::int64_t after = slot_expire_.empty() ? spec_.expire_seconds : slot_expire_[slot_of(unmix(hash))];
  return now - static_cast<std::int64_t>(time) >= after;
}

// Called with the partition locked and a write begun. Takes the oldest rows that are not newer than
// `time`: an event from the past does not push out what came after it.
std::size_t Table::expire_oldest(Body& body, Partition& part, std::size_t wanted, std::uint32_t time) {
  const Index index = part.index.load(std::memory_order_relaxed);
  std::vector<std::pair<std::uint32_t, std::uint64_t>> candidates;
  for (std::size_t i = 0; i < index.size(); ++i) {
    const Slot& slot = index.slots()[i];
    if (slot.row != 0 && slot.time <= time) candidates.emplace_back(slot.time, slot.hash);
  }
  wanted = std::min(wanted, candidates.size());
  std::nth_element(candidates.begin(), candidates.begin() + wanted, candidates.end());
  std::vector<std::uint64_t> gone;
  for (std::size_t i = 0; i < wanted; ++i) {
    Slot* slot = index.find(candidates[i].second);
    if (removals_matter()) {
      note_change(body, part, *slot);
      gone.push_back(slot->hash);
    }
    free_row(body, part, slot->row);
    index.erase(slot);
  }
  note_removals(gone);
  part.rows -= static_cast<std::uint32_t>(wanted);
  part.evicted += wanted;
  return wanted;
}

std::size_t Table::count_expired(std::int64_t now) const {
  const Epochs::Visit visit(epochs_);
  Body& body = *body_.load();
  std::vector<Partition*> parts;
  {
    std::lock_guard lock(body.mutex);
    for (const auto& part : body.partitions) parts.push_back(part.get());
  }
  std::atomic<std::size_t> total{0};
  spread(parts.size(), 4, [&](std::size_t begin, std::size_t end) {
    std::size_t found = 0;
    for (std::size_t p = begin; p < end; ++p) {
      std::lock_guard lock(parts[p]->mutex);
      const Index index = parts[p]->index.load(std::memory_order_relaxed);
      for (std::size_t i = 0; i < index.size(); ++i) {
        const Slot& slot = index.slots()[i];
        found += slot.row != 0 && expired(slot.hash, slot.time, now);
      }
    }
    total += found;
  });
  return total;
}

// One partition after another, each locked only while it is walked; threads share the partitions. A partition
// that splits meanwhile may leave its upper half for the next call, which is as good: rows expire again and
// again.
std::size_t Table::evict(std::int64_t now) {
  Writing writing(*this);
  Body& body = *body_.load();
  std::vector<Partition*> parts;
  {
    std::lock_guard lock(body.mutex);
    for (const auto& part : body.partitions) parts.push_back(part.get());
  }
  return evict_from(body, parts, now);
}

std::size_t Table::evict_some(std::int64_t now, std::uint64_t& cursor, std::size_t slots) {
  Writing writing(*this);
  Body& body = *body_.load();
  std::vector<Partition*> parts;
  for (std::size_t walked = 0; walked < slots;) {
    const Epochs::Visit visit(epochs_);
    Partition& part = *body.route(cursor);
    std::lock_guard lock(part.mutex);
    if (!part.owns(cursor)) continue;  // it split meanwhile
    parts.push_back(&part);
    walked += part.index.load(std::memory_order_relaxed).size();
    cursor = part.last.load(std::memory_order_relaxed) + 1;
    if (cursor == 0) break;
  }
  return evict_from(body, parts, now);
}

std::size_t Table::evict_from(Body& body, const std::vector<Partition*>& parts, std::int64_t now) {
  std::atomic<std::size_t> total{0};
  spread(parts.size(), 4, [&](std::size_t begin, std::size_t end) {
    std::vector<std::uint64_t> gone;
    for (std::size_t p = begin; p < end; ++p) {
      Partition& part = *parts[p];
      std::lock_guard lock(part.mutex);
      const Index index = part.index.load(std::memory_order_relaxed);
      gone.clear();
      for (std::size_t i = 0; i < index.size(); ++i) {
        const Slot& slot = index.slots()[i];
        if (slot.row != 0 && expired(slot.hash, slot.time, now)) gone.push_back(slot.hash);
      }
      if (gone.empty()) continue;
      Change change(part);
      for (const std::uint64_t hash : gone) {
        Slot* slot = index.find(hash);
        if (watched()) note_change(body, part, *slot);
        free_row(body, part, slot->row);
        index.erase(slot);
      }
      note_removals(gone);
      part.rows -= static_cast<std::uint32_t>(gone.size());
      part.evicted += gone.size();
      if (static_cast<double>(part.rows) < static_cast<double>(index.size()) * 0.3)
        resize(body, part, part.rows);
      total += gone.size();
    }
  });
  return total;
}

// ---- walking -------------------------------------------------------------------------------------

namespace {

// The columns that a scan returns. They grow with the rows found: most scans are short.
class ChunkBuilder {
 public:
  ChunkBuilder(const Entry& entry, std::size_t limit)
      : entry_(entry), dim_(entry.dim()), state_dim_(entry.state_dim()), limit_(limit) {}

  std::size_t rows() const { return chunk_.rows; }
  std::size_t left() const { return limit_ - chunk_.rows; }

  void reserve(std::size_t more) {
    if (chunk_.rows + more <= capacity_) return;
    const std::size_t wanted = std::min(limit_, std::max(chunk_.rows + more, 2 * capacity_));
    const auto moved = [&](auto& column, std::size_t width) {
      using T = std::remove_reference_t<decltype(column[0])>;
      std::unique_ptr<T[]> wider(new T[wanted * width]);
      if (chunk_.rows > 0) std::memcpy(wider.get(), column.get(), chunk_.rows * width * sizeof(T));
      column = std::move(wider);
    };
    moved(chunk_.ids, 1);
    moved(chunk_.times, 1);
    moved(chunk_.values, dim_);
    moved(chunk_.state, state_dim_);
    capacity_ = wanted;
  }

  // Writes the row that is `at` rows behind the last one; reserve() must have been called for it.
  void put(std::size_t at, std::uint64_t hash, std::uint32_t time, const std::byte* row) {
    at += chunk_.rows;
    chunk_.ids[at] = unmix(hash);
    chunk_.times[at] = time;
    entry_.read(row, chunk_.values.get() + at * dim_);
    std::memcpy(chunk_.state.get() + at * state_dim_, entry_.state(row), state_dim_ * sizeof(float));
  }
  void advance(std::size_t count) { chunk_.rows += count; }

  Chunk finish(std::optional<std::uint64_t> cursor) {
    chunk_.done = !cursor.has_value();
    chunk_.cursor = cursor.value_or(0);
    return std::move(chunk_);
  }

 private:
  const Entry& entry_;
  const std::size_t dim_;
  const std::size_t state_dim_;
  const std::size_t limit_;
  Chunk chunk_;
  std::size_t capacity_ = 0;
};

// In the order of hashes: a table with the same rows is always walked the same way.
template <class Found>
void sort_first(std::vector<Found>& found, std::size_t take) {
  const auto by_hash = [](const Found& a, const Found& b) { return a.hash < b.hash; };
  if (take < found.size()) std::nth_element(found.begin(), found.begin() + take, found.end(), by_hash);
  std::sort(found.begin(), found.begin() + take, by_hash);
}

}  // namespace

// Partitions are ranges of hashes, so a walk by hash takes them one by one and needs no other state than the
// next hash: it survives splits and resizes between calls. Rows inserted behind the cursor meanwhile are not
// seen.
Chunk Table::scan(std::uint64_t cursor, std::uint64_t last, std::size_t limit) const {
  if (limit == 0) throw std::invalid_argument("scan: limit must be at least 1");
  ChunkBuilder chunk(entry_, limit);
  Epochs::Visit visit(epochs_);
  const Body& body = *body_.load();
  std::vector<Slot> found;
  for (;;) {
    Partition& part = *body.route(cursor);
    std::unique_lock lock(part.mutex);
    if (!part.owns(cursor)) continue;
    const Index index = part.index.load(std::memory_order_relaxed);
    found.clear();
    for (std::size_t i = 0; i < index.size(); ++i) {
      const Slot& slot = index.slots()[i];
      if (slot.row != 0 && slot.hash >= cursor && slot.hash <= last) found.push_back(slot);
    }
    const std::size_t take = std::min(found.size(), chunk.left());
    sort_first(found, take);
    chunk.reserve(take);
    for (std::size_t i = 0; i < take; ++i) {
      if (i + kRowsAhead < take) prefetch<0>(body.rows.row(found[i + kRowsAhead].row), entry_.row_bytes());
      chunk.put(i, found[i].hash, found[i].time, body.rows.row(found[i].row));
    }
    chunk.advance(take);
    const std::uint64_t part_last = part.last;
    lock.unlock();
    if (take < found.size()) return chunk.finish(found[take - 1].hash + 1);
    if (part_last >= last) return chunk.finish({});
    cursor = part_last + 1;
    if (chunk.left() == 0) return chunk.finish(cursor);
  }
}

// Three rounds for each partition, none of which holds its lock for long, so that training hardly waits:
//   1. locked once: copy the keys of its rows (16 bytes each), from the index and from the captured rows;
//   2. locked for 32 rows at a time: copy rows whose bit in taken_ is still clear;
//   3. locked once: rows that a writer captured between 1 and 2 are read from the captured rows.
// The order matters: a writer sets the bit and captures the row before it changes it, so a row with a clear
// bit is unchanged, and a row with a set bit has been captured.
Chunk Table::scan_snapshot(const TableSnapshot& snapshot, std::uint64_t cursor, std::uint64_t last,
                           std::size_t limit, bool changed_only) const {
  constexpr std::size_t kAtOnce = 32;
  if (limit == 0) throw std::invalid_argument("scan: limit must be at least 1");
  struct Found {
    std::uint64_t hash;
    std::uint32_t row;  // its number, or 0: it was captured already
    std::uint32_t time;
  };
  ChunkBuilder chunk(entry_, limit);
  Epochs::Visit visit(epochs_);
  const Body& body = *body_.load();
  const auto wanted = [&](std::uint64_t hash, std::uint32_t row) {
    return hash >= cursor && hash <= last && (!changed_only || snapshot.changes_->rows.test(row));
  };
  const auto check_open = [&] {
    if (!snapshot.open_) throw std::invalid_argument("scan: the snapshot was closed");
  };
  std::vector<Found> found;
  std::vector<std::size_t> late;  // positions in `found` whose rows were captured
  for (;;) {
    Partition& part = *body.route(cursor);
    std::unique_lock lock(part.mutex);
    if (!part.owns(cursor)) continue;
    check_open();
    const Index index = part.index.load(std::memory_order_relaxed);
    found.clear();
    for (std::size_t i = 0; i < index.size(); ++i) {
      const Slot& slot = index.slots()[i];
      if (slot.row != 0 && !snapshot.taken_.test(slot.row) && wanted(slot.hash, slot.row))
        found.push_back({slot.hash, slot.row, slot.time});
    }
    if (part.captured != nullptr)
      for (const CapturedRows::Key& key : part.captured->keys)
        if (wanted(key.hash, key.row)) found.push_back({key.hash, 0, key.time});
    const std::uint64_t part_last = part.last;
    lock.unlock();

    const std::size_t take = std::min(found.size(), chunk.left());
    sort_first(found, take);
    chunk.reserve(take);
    late.clear();
    for (std::size_t begin = 0; begin < take; begin += kAtOnce) {
      const std::size_t end = std::min(take, begin + kAtOnce);
      for (std::size_t i = begin; i < end; ++i)
        if (found[i].row != 0) prefetch<0>(body.rows.row(found[i].row), entry_.row_bytes());
      // The partition may have split: both halves are guarded by their own locks, and a row that is not taken
      // has not changed. Which lock is held matters only to a row that is about to change, in its own half.
      for (std::size_t i = begin; i < end;) {
        Partition& owner = *body.route(found[i].hash);
        std::lock_guard held(owner.mutex);
        if (!owner.owns(found[i].hash)) continue;
        check_open();
        for (; i < end && owner.owns(found[i].hash); ++i) {
          if (found[i].row == 0 || snapshot.taken_.test(found[i].row))
            late.push_back(i);
          else
            chunk.put(i, found[i].hash, found[i].time, body.rows.row(found[i].row));
        }
      }
    }
    for (std::size_t l = 0; l < late.size();) {  // in the order of hashes, so partition after partition
      Partition& owner = *body.route(found[late[l]].hash);
      std::lock_guard held(owner.mutex);
      if (!owner.owns(found[late[l]].hash)) continue;
      check_open();
      const std::size_t first = l;
      while (l < late.size() && owner.owns(found[late[l]].hash)) ++l;
      const CapturedRows& captured = *owner.captured;
      for (std::size_t k = 0; k < captured.keys.size(); ++k) {
        const auto at =
            std::lower_bound(late.begin() + first, late.begin() + l, captured.keys[k].hash,
                             [&](std::size_t i, std::uint64_t hash) { return found[i].hash < hash; });
        if (at != late.begin() + l && found[*at].hash == captured.keys[k].hash)
          chunk.put(*at, captured.keys[k].hash, captured.keys[k].time,
                    captured.bytes.data() + k * entry_.row_bytes());
      }
    }
    chunk.advance(take);
    if (take < found.size()) return chunk.finish(found[take - 1].hash + 1);
    if (part_last >= last) return chunk.finish({});
    cursor = part_last + 1;
    if (chunk.left() == 0) return chunk.finish(cursor);
  }
}

}  // namespace monolith
