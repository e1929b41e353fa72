// What a table does as the hot tier of another: it says which rows were used least, and rows move out of it
// and into it without a change that anyone would have to know of.
#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "prefetch.h"
#include "row_uses.h"
#include "table_body.h"
#include "table_snapshot.h"

namespace monolith {
namespace {

constexpr std::size_t kMovedTogether = 64;  // rows that are moved under one change of a partition
constexpr double kSparseLoad = 0.5;         // an index with fewer rows is replaced when the table shrinks
constexpr std::size_t kLinesAhead = 16;     // that are on their way when idle rows are sought
constexpr std::size_t kStride = 16;         // the search for idle rows takes one bucket in so many in turn

// The order in which the search for idle rows goes through the buckets of an index: one in kStride, then the
// ones next to these, and so on. Buckets that it has just left are nearly empty, and those it comes to next
// have had the longest time to fill. Next to each other the latter would have twice as many rows as the
// average: more than slots, so that each probe among them would go through thousands.
class SweepOrder {
 public:
  explicit SweepOrder(std::uint32_t buckets) : buckets_(buckets), each_((buckets + kStride - 1) / kStride) {}

  std::size_t steps() const { return each_ * kStride; }
  // buckets() or more for a step without one.
  std::size_t bucket(std::size_t step) const { return step % each_ * kStride + step / each_; }
  std::size_t buckets() const { return buckets_; }

 private:
  std::size_t buckets_, each_;
};

}  // namespace

// Calls work(partition, items, count) for runs of ids of one partition, whose lock is held.
template <class Work>
void Table::each_window(Body& body, const Item* items, std::size_t count, const Work& work) {
  for (std::size_t at = 0; at < count;) {
    epochs_.collect();
    const Epochs::Visit visit(epochs_);
    Partition& part = *body.route(items[at].hash);
    std::lock_guard lock(part.mutex);
    const std::uint64_t first = part.first.load(std::memory_order_relaxed);
    const std::uint64_t width = part.last.load(std::memory_order_relaxed) - first;
    std::size_t run = 0;  // 0 if the partition split while this waited for its lock
    while (at + run < count && items[at + run].hash - first <= width) ++run;
    while (run > 0) {
      const std::size_t some = std::min(run, kWindow);
      work(part, items + at, some, run, count - at);
      at += some;
      run -= some;
      if (part.rows > part.split_at) {
        split(body, part);
        break;
      }
      if (epochs_.pending()) break;
    }
  }
}

RowChange Table::change_of(std::uint32_t row) const {
  if (changes_ != nullptr && changes_->rows.test(row)) return kChanged;
  const bool before = snapshot_ != nullptr && snapshot_->changes_ != nullptr;
  return before && snapshot_->changes_->rows.test(row) ? kChangedBeforeSnapshot : kUnchanged;
}

void Table::count_uses(std::span<const std::int64_t> ids, std::uint8_t* found) {
  uses_->begin();
  if (ids.empty()) return;
  Body& body = *body_.load();
  auto batch = borrow();
  group(ids, *batch);
  each_run(*batch, ids.size(), [&](std::size_t first, std::size_t last) {
    const std::size_t begin = batch->starts[first];
    each_window(
        body, batch->items.data() + begin, batch->starts[last] - begin,
        [&](Partition& part, const Item* items, std::size_t count, std::size_t run, std::size_t left) {
          Slot* slots[kWindow];
          std::byte* rows[kWindow];
          find_rows(body, part.index.load(std::memory_order_relaxed), items, count, run, left, slots, rows);
          for (std::size_t i = 0; i < count; ++i) {
            found[items[i].position] = slots[i] != nullptr;
            if (slots[i] != nullptr) uses_->note(slots[i]->row);
          }
        });
  });
  give_back(std::move(batch));
}

std::vector<std::byte> Table::idle_rows(std::size_t wanted) {
  std::vector<std::byte> records;
  const std::size_t bytes = sizeof(RecordHead) + entry_.row_bytes();
  wanted = std::min(wanted, size());
  records.reserve(wanted * bytes);
  const Epochs::Visit visit(epochs_);
  const Body& body = *body_.load();
  // All partitions lose rows alike: each keeps the memory of rows that left it for its own new ones. The hand
  // is the same share of every index. After a round without enough new rows all age: four rounds bring every
  // count to 0, and one more finds none but those of the last call.
  uses_->remember(size());
  for (double swept = 0; swept < 6 && records.size() < wanted * bytes;) {
    const double missing = static_cast<double>(wanted - records.size() / bytes) / static_cast<double>(size());
    const double until = std::min(1.0, hand_ + std::max(missing, 1e-4));
    for (std::uint64_t cursor = 0;;) {
      Partition& part = *body.route(cursor);
      std::lock_guard lock(part.mutex);
      if (!part.owns(cursor)) continue;
      const Index index = part.index.load(std::memory_order_relaxed);
      const SweepOrder order(index.buckets());
      const auto steps = static_cast<double>(order.steps());
      const auto end = static_cast<std::size_t>(until * steps);
      for (auto step = static_cast<std::size_t>(hand_ * steps); step < end; ++step) {
        if (const std::size_t ahead = order.bucket(step + kLinesAhead); ahead < order.buckets())
          __builtin_prefetch(index.slots() + ahead * kBucketSlots);
        const std::size_t bucket = order.bucket(step);
        if (bucket >= order.buckets()) continue;
        for (std::size_t i = bucket * kBucketSlots; i < (bucket + 1) * kBucketSlots; ++i) {
          const Slot& slot = index.slots()[i];
          if (slot.row == 0 || !uses_->idle(slot.row, swept >= 1)) continue;
          const RecordHead head{slot.hash, slot.time, change_of(slot.row)};
          const std::byte* const row = body.rows.row(slot.row);
          records.insert(records.end(), reinterpret_cast<const std::byte*>(&head),
                         reinterpret_cast<const std::byte*>(&head + 1));
          records.insert(records.end(), row, row + entry_.row_bytes());
          uses_->leave(slot.row, slot.hash);
        }
      }
      const std::uint64_t last = part.last.load(std::memory_order_relaxed);
      if (last == std::numeric_limits<std::uint64_t>::max()) break;
      cursor = last + 1;
    }
    swept += until - hand_;
    hand_ = until < 1 ? until : 0;
  }
  return records;
}

void Table::move_out(std::span<const std::byte> records) {
  const std::size_t bytes = sizeof(RecordHead) + entry_.row_bytes();
  std::vector<std::int64_t> ids;
  for (std::size_t at = 0; at < records.size(); at += bytes)
    ids.push_back(unmix(hash_at(records.data() + at)));
  if (ids.empty()) return;
  Writing writing(*this);
  Body& body = *body_.load();
  auto batch = borrow();
  group(ids, *batch);
  each_run(*batch, ids.size(), [&](std::size_t first, std::size_t last) {
    const std::size_t begin = batch->starts[first];
    each_window(body, batch->items.data() + begin, batch->starts[last] - begin,
                [&](Partition& part, const Item* items, std::size_t count, std::size_t, std::size_t) {
                  const Index index = part.index.load(std::memory_order_relaxed);
                  if (snapshot_ != nullptr) {  // which must keep them
                    for (std::size_t i = 0; i < count; ++i)
                      if (const Slot* const slot = index.find(items[i].hash)) note_change(body, part, *slot);
                  }
                  const Change change(part);
                  for (std::size_t i = 0; i < count; ++i) {
                    Slot* const slot = index.find(items[i].hash);
                    if (slot == nullptr) continue;
                    free_row(body, part, slot->row);
                    index.erase(slot);
                    --part.rows;
                  }
                });
  });
  give_back(std::move(batch));
}

void Table::move_in(std::span<const std::byte> records) {
  const std::size_t bytes = sizeof(RecordHead) + entry_.row_bytes();
  std::vector<std::int64_t> ids;
  for (std::size_t at = 0; at < records.size(); at += bytes)
    ids.push_back(unmix(hash_at(records.data() + at)));
  if (ids.empty()) return;
  std::atomic<bool> full{false};
  {
    Writing writing(*this);
    Body& body = *body_.load();
    auto batch = borrow();
    group(ids, *batch);
    each_run(*batch, ids.size(), [&](std::size_t first, std::size_t last) {
      const std::size_t begin = batch->starts[first];
      each_window(body, batch->items.data() + begin, batch->starts[last] - begin,
                  [&](Partition& part, const Item* items, std::size_t count, std::size_t, std::size_t) {
                    for (std::size_t at = 0; at < count; at += kMovedTogether) {
                      const std::size_t end = std::min(count, at + kMovedTogether);
                      const Change change(part);
                      grow_for(body, part, static_cast<std::uint32_t>(end - at), 0);
                      for (std::size_t i = at; i < end; ++i) {
                        const std::byte* const record = records.data() + items[i].position * bytes;
                        if (part.index.load(std::memory_order_relaxed).find(items[i].hash) != nullptr)
                          continue;
                        const RecordHead head = head_at(record);
                        Slot* const slot = insert(body, part, head.hash, head.time);
                        if (slot == nullptr) {
                          full = true;
                          continue;
                        }
                        --part.inserted;  // it is no new row
                        std::memcpy(body.rows.row(slot->row), record + sizeof(head), entry_.row_bytes());
                        uses_->start(slot->row, head.hash);
                        if (changes_ == nullptr) continue;
                        // insert() noted a birth: say what is so. The number may be that of a row that
                        // changed.
                        if (head.epoch != kChanged) changes_->rows.reset(slot->row);
                        if (head.epoch == kChangedBeforeSnapshot && snapshot_ != nullptr &&
                            snapshot_->changes_ != nullptr)
                          snapshot_->changes_->rows.set(slot->row);
                      }
                    }
                  });
    });
    give_back(std::move(batch));
  }
  if (full) throw std::bad_alloc();
}

void Table::become_hot_tier() {
  hot_tier_ = true;
  uses_ = std::make_unique<RowUses>();
  body_.load()->heap.give_back_freed();
}

// The rows with the highest numbers take the numbers of free rows below them. Readers take no lock: the
// version of the partition tells them that a row is elsewhere.
bool Table::shrink_to(std::size_t rows) {
  const PausedWriters paused(*this, PausedWriters::kAlone);
  if (snapshot_ != nullptr) return false;
  Body& body = *body_.load();
  std::vector<Partition*> parts;
  {
    std::lock_guard lock(body.mutex);
    for (const auto& part : body.partitions) parts.push_back(part.get());
  }
  constexpr std::size_t kChunk = RowArenas::kChunkRows;
  const std::size_t kept = (std::max(rows, size()) + kChunk - 1) / kChunk * kChunk;
  const auto end = static_cast<std::uint32_t>(std::min<std::size_t>(kChunk + kept, body.rows.end()));
  std::vector<std::uint32_t> free;  // below the end
  for (Partition* const part : parts) {
    std::lock_guard lock(part->mutex);
    for (; part->chunk_next < part->chunk_end; ++part->chunk_next) free_row(body, *part, part->chunk_next);
    while (part->free_rows != 0)
      if (const std::uint32_t row = take_row(body, *part); row < end) free.push_back(row);
  }
  auto uses = std::make_unique<RowUses>(*uses_);
  for (Partition* const part : parts) {
    std::lock_guard lock(part->mutex);
    const Index index = part->index.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < index.size(); ++i) {
      Slot& slot = index.slots()[i];
      const std::uint32_t from = slot.row;
      if (from == 0) continue;
      if (from < end) {
        uses->copy(*uses_, from, from);
        continue;
      }
      const std::uint32_t to = free.back();
      free.pop_back();
      uses->copy(*uses_, from, to);
      std::memcpy(body.rows.row(to), body.rows.row(from), entry_.row_bytes());
      if (changes_ != nullptr) {
        if (changes_->rows.test(from))
          changes_->rows.set(to);
        else
          changes_->rows.reset(to);
        changes_->rows.reset(from);
      }
      const Change change(*part);
      __atomic_store_n(&slot.row, to, __ATOMIC_RELEASE);
    }
    // An index that is much too large for what is left.
    if (part->rows < kSparseLoad * static_cast<double>(index.size())) {
      const Change change(*part);
      resize(body, *part, part->rows);
    }
  }
  for (std::size_t i = 0; i < free.size(); ++i) {
    Partition& part = *parts[i % parts.size()];
    std::lock_guard lock(part.mutex);
    free_row(body, part, free[i]);
  }
  uses_ = std::move(uses);
  body.rows.release_from(end);
  return true;
}

void Table::note_removals_elsewhere(const std::vector<std::uint64_t>& hashes) {
  Writing writing(*this);
  note_removals(hashes);
}

void Table::note_arrivals_elsewhere(const std::vector<std::uint64_t>& hashes, std::uint32_t newest) {
  if (hashes.empty()) return;
  Writing writing(*this);
  advance_clock(1, {newest});
  if (touched_.empty()) return;
  std::vector<std::int64_t> ids(hashes.size());
  std::transform(hashes.begin(), hashes.end(), ids.begin(), unmix);
  tell_touched(ids);
}

std::int64_t Table::newest_expired(std::int64_t now) const {
  std::int64_t least = spec_.expire_seconds;
  for (const std::int64_t after : slot_expire_) least = std::min(least, after);
  return now - least;
}

}  // namespace monolith
