// Copy on write. While a snapshot is open, a writer copies a row before it changes it for the first time:
//
//   writer, partition locked    set the row's bit in taken_  ->  copy the row to part.captured  ->  change
//   the row snapshot, partition locked  bit clear: read the row in place;  bit set: read the copy, if there
//   is one
//
// A row that is created while the snapshot is open has its bit set and no copy, so the snapshot does not show
// it.
#include "table_snapshot.h"

#include <algorithm>
#include <stdexcept>

#include "table_body.h"

namespace monolith {

TableSnapshot::TableSnapshot(Table& table) : table_(table) {
  const Table::PausedWriters paused(table_);
  if (table_.snapshot_ != nullptr)
    throw std::invalid_argument("table: a snapshot is open already; close it first");
  stats_ = table_.stats();
  scales_ = table_.scales();
  if (table_.changes_ != nullptr) {
    auto fresh = std::make_unique<TableChanges>();
    changes_ = std::exchange(table_.changes_, std::move(fresh));
  }
  table_.snapshot_ = this;
}

TableSnapshot::~TableSnapshot() {
  close(false);
}

Chunk TableSnapshot::scan(std::uint64_t cursor, std::uint64_t last, std::size_t limit,
                          bool changed_only) const {
  if (!open_) throw std::invalid_argument("scan: the snapshot was closed");
  if (changed_only && changes_ == nullptr)
    throw std::invalid_argument("scan: this table does not keep track of changes");
  return table_.scan_snapshot(*this, cursor, last, limit, changed_only);
}

std::vector<std::int64_t> TableSnapshot::removed() const {
  std::vector<std::int64_t> ids;
  if (changes_ != nullptr)
    for (const std::uint64_t hash : changes_->removed) ids.push_back(unmix(hash));
  return ids;
}

void TableSnapshot::close(bool saved) {
  if (!open_.exchange(false)) return;
  const Table::PausedWriters paused(table_);
  table_.snapshot_ = nullptr;
  Table::Body& body = *table_.body_.load();
  std::vector<Partition*> parts;
  {
    std::lock_guard lock(body.mutex);
    for (const auto& part : body.partitions) parts.push_back(part.get());
  }
  for (Partition* part : parts) {
    std::lock_guard lock(part->mutex);  // a scan may still be there
    part->captured.reset();
  }
  // Changes that were not saved count again for the next snapshot, unless the table was cleared since: then
  // all rows from before are gone anyway.
  if (!saved && changes_ != nullptr && table_.changes_ != nullptr && !table_.changes_->cleared) {
    table_.changes_->rows.add(changes_->rows);
    table_.changes_->remove(changes_->removed);
    table_.changes_->cleared = changes_->cleared;
  }
}

void Table::track_changes(bool on) {
  const PausedWriters paused(*this);
  changes_ = on ? std::make_unique<TableChanges>() : nullptr;
}

// Called with the partition locked, before the row in `slot` changes or goes.
void Table::note_change(const Body& body, Partition& part, const Slot& slot) {
  if (changes_ != nullptr) changes_->rows.set(slot.row);
  if (snapshot_ == nullptr || snapshot_->taken_.set(slot.row)) return;
  if (part.captured == nullptr) {
    part.captured = std::make_unique<CapturedRows>();
    // Reserved for all rows: unused pages are never touched, and growth would copy the rows again and again.
    part.captured->keys.reserve(part.rows);
    part.captured->bytes.reserve(part.rows * entry_.row_bytes());
  }
  CapturedRows& captured = *part.captured;
  captured.keys.push_back({slot.hash, slot.row, slot.time});
  const std::byte* row = body.rows.row(slot.row);
  captured.bytes.insert(captured.bytes.end(), row, row + entry_.row_bytes());
  snapshot_->captured_bytes_.fetch_add(sizeof(CapturedRows::Key) + entry_.row_bytes(),
                                       std::memory_order_relaxed);
}

// Called when an id without a row gets one: the snapshot must not show it.
void Table::note_birth(std::uint32_t row) {
  if (changes_ != nullptr) changes_->rows.set(row);
  if (snapshot_ != nullptr) snapshot_->taken_.set(row);
}

void Table::note_removals(const std::vector<std::uint64_t>& hashes) {
  if (hashes.empty()) return;
  if (changes_ != nullptr) changes_->remove(hashes);
  if (touched_.empty()) return;
  std::vector<std::int64_t> ids(hashes.size());
  std::transform(hashes.begin(), hashes.end(), ids.begin(), unmix);
  tell_touched(ids);
}

// Called with `part` locked and `sibling`, which takes the hashes from `middle` on, not yet published.
void Table::split_captured(Partition& part, Partition& sibling, std::uint64_t middle) const {
  if (part.captured == nullptr) return;
  const std::size_t row_bytes = entry_.row_bytes();
  auto low = std::make_unique<CapturedRows>();
  auto high = std::make_unique<CapturedRows>();
  const CapturedRows& old = *part.captured;
  for (std::size_t i = 0; i < old.keys.size(); ++i) {
    CapturedRows& side = old.keys[i].hash >= middle ? *high : *low;
    side.keys.push_back(old.keys[i]);
    const std::byte* row = old.bytes.data() + i * row_bytes;
    side.bytes.insert(side.bytes.end(), row, row + row_bytes);
  }
  part.captured = std::move(low);
  sibling.captured = std::move(high);
}

}  // namespace monolith
