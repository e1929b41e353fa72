#include "tiered_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "digest.h"
#include "hash.h"

namespace monolith {
namespace {

constexpr std::size_t kMovedAtOnce = 16384;                   // rows that move out by one call
constexpr std::size_t kExpiredAtOnce = std::size_t{1} << 18;  // slots of hot rows that are looked at
constexpr std::size_t kReadAtOnce = 65536;  // cold rows whose records are in memory at the same time
constexpr std::uint64_t kLastHash = std::numeric_limits<std::uint64_t>::max();
// Of the index, per row: slots of 16 bytes, of which half are free when a partition has just split.
constexpr std::size_t kIndexBytes = 32;
constexpr std::size_t kUseBytes = 6;  // at most, of what `RowUses` knows
// One in so many of the memory's bytes stays free: for a third buffer, and for arrays that are being
// replaced.
constexpr std::uint64_t kSpare = 32;
constexpr std::uint64_t kStep = 64;         // memory is given back by one in so many
constexpr std::uint64_t kLeastHot = 16;     // at least one in so many is for hot rows
constexpr std::uint64_t kUneven = 16;       // the index may have one in so many bytes more than on average
constexpr std::uint64_t kLeastRecent = 64;  // and for rows that lookups read: between one in so many
constexpr std::uint64_t kMostRecent = 4;    // and one in so many

std::size_t hot_row_bytes(std::size_t row_bytes) {
  return row_bytes + kIndexBytes + kUseBytes;
}

// An index that takes nearly all of the memory leaves a sixteenth: training continues, slowly.
std::uint64_t least_hot_rows(std::uint64_t memory_bytes, std::size_t row_cost) {
  return std::max<std::uint64_t>(memory_bytes / kLeastHot / row_cost, 1);
}

// The most rows whose index has so many bytes.
std::uint64_t most_indexed(std::uint64_t bytes) {
  const std::uint64_t sure = bytes - bytes / kUneven;
  std::uint64_t fit = 0;
  for (std::uint64_t step = std::bit_floor(sure | 1); step > 0; step /= 2)
    if (ColdIndex::expected_bytes(fit + step) <= sure) fit += step;
  return std::max<std::uint64_t>(fit, 1);
}

void show(const Entry& entry, const std::byte* row, float* values) {
  if (!entry.serving() && entry.decays_lazily())
    entry.read_decayed(row, values);
  else
    entry.read(row, values);
  if (entry.has_view()) entry.view(values);
}

}  // namespace

TierSizes::TierSizes(std::size_t row_bytes, std::uint64_t memory_bytes, std::size_t buffer_bytes,
                     std::size_t recent_bytes, std::uint64_t rows)
    : hot_rows(rows), hot_bytes(hot_row_bytes(row_bytes)), index_bytes(0) {
  const ColdLayout layout(row_bytes);
  const double block = static_cast<double>(layout.block_bytes);
  record_bytes = layout.record_bytes;
  block_bytes = layout.block_bytes;
  file_bytes = block / static_cast<double>(layout.rows_per_block) +
               block / static_cast<double>(layout.heads_per_block);
  // A smaller index leaves memory for more hot rows, which make it smaller: few rounds settle both.
  for (int round = 0; round < 8; ++round) {
    index_bytes = ColdIndex::expected_bytes(rows - hot_rows);
    const std::uint64_t other = memory_bytes / kSpare + 2 * buffer_bytes + recent_bytes + index_bytes;
    const std::uint64_t fit = (memory_bytes - std::min(memory_bytes, other)) / hot_bytes;
    hot_rows = std::min(rows, std::max(fit, least_hot_rows(memory_bytes, hot_bytes)));
  }
}

TieredTable::TieredTable(std::shared_ptr<Table> hot, const TieredSpec& spec, ColdSpec cold,
                         std::shared_ptr<BlockReader> reader)
    : hot_(std::move(hot)),
      spec_(spec),
      row_cost_(hot_row_bytes(hot_->row_bytes())),
      cold_(std::move(cold), std::move(reader)),
      recent_bytes_(cold_.stats().bytes_recent) {
  hot_->become_hot_tier();
  const std::uint64_t others = 2 * cold_.buffer_bytes() + spec_.memory_bytes / kLeastRecent +
                               least_hot_rows(spec_.memory_bytes, row_cost_) * row_cost_ +
                               hot_->stats().bytes_total;
  index_bytes_ = memory_limit() - std::min(memory_limit(), others);
  most_rows_ = most_indexed(index_bytes_);
}

std::uint64_t TieredTable::memory_limit() const {
  return spec_.memory_bytes - spec_.memory_bytes / kSpare;
}

// All that is in memory counts as it is, so rows are hot until the limit is reached. Then the hot table has
// memory for some rows, and keeps it. It is to have fewer when something else grew: those leave by and by,
// and their memory is given back once it is a step.
TieredTable::Room TieredTable::room() const {
  const TableStats hot = hot_->stats();
  const ColdStats cold = cold_.stats();
  Room room;
  room.held = hot.bytes_rows / hot_->row_bytes();
  // A buffer that fills and one that is written, whether they are there or not.
  const std::uint64_t used = hot.bytes_total + room.held * kUseBytes + cold.bytes_index +
                             std::max<std::uint64_t>(cold.bytes_buffers, 2 * cold_.buffer_bytes()) +
                             std::max<std::uint64_t>(cold.bytes_recent, recent_bytes_);
  const std::uint64_t limit = memory_limit();
  room.over = used > limit ? used - limit : 0;
  // A part has no row, since each partition has free rows of its own.
  room.rows = room.held - room.held / 64;
  if (room.over == 0)
    room.rows += (limit - used) / row_cost_;
  else
    room.rows -= std::min(room.rows, room.over / hot_->row_bytes());
  room.rows = std::max(room.rows, least_hot_rows(spec_.memory_bytes, row_cost_));
  if (spec_.most_hot_rows != 0) room.rows = std::min(room.rows, spec_.most_hot_rows);
  return room;
}

std::uint64_t TieredTable::cold_memory_bytes() const {
  const ColdStats stats = cold_.stats();
  const std::uint64_t held = hot_->stats().bytes_rows / hot_->row_bytes();
  return stats.bytes_index + stats.bytes_buffers + stats.bytes_recent + kUseBytes * held;
}

bool TieredTable::must_shrink() const {
  return shrinks_.load(std::memory_order_relaxed) && !snapshot_open_;
}

void TieredTable::shrink() {
  shrinks_ = !hot_->shrink_to(room().rows);
}

// Lookups are one batch ahead of writes, so what two of them read is kept. Slowly: a walk over the table
// between two steps of training is no batch.
void TieredTable::follow_lookups() {
  const std::uint64_t read = cold_.count_remembered();
  lately_ = read > lately_ ? std::min(read, lately_ + lately_ / 4 + 64) : lately_ - (lately_ - read) / 32;
  const std::uint64_t wanted = lately_ * 9 / 4 * (cold_.record_bytes() + 16);
  const ColdStats cold = cold_.stats();
  const std::uint64_t least = spec_.memory_bytes / kLeastRecent;
  const std::uint64_t left = least + index_bytes_ - std::min(index_bytes_, cold.bytes_index);
  recent_bytes_ = std::clamp(wanted, least, std::min(spec_.memory_bytes / kMostRecent, left));
  const std::uint64_t held = cold.bytes_recent;
  if (recent_bytes_ < held && recent_bytes_ + recent_bytes_ / 4 > held) return;
  // More once the hot table has given memory for it.
  if (recent_bytes_ < held || room().over <= spec_.memory_bytes / kStep) cold_.remember_up_to(recent_bytes_);
}

// ---- reading -------------------------------------------------------------------------------------

// Calls use(position, head, row) for the ids that are not hot and have a cold row.
template <class Use>
void TieredTable::each_cold(std::span<const std::int64_t> ids, std::span<const std::uint8_t> hot,
                            bool remember, const Use& use) {
  if (cold_.size() == 0) return;
  std::vector<std::uint64_t> hashes;
  std::vector<std::size_t> places;
  std::vector<std::uint64_t> locations;
  std::vector<std::byte> records;
  const std::size_t bytes = cold_.record_bytes();
  const auto flush = [&] {
    if (hashes.empty()) return;
    records.resize(hashes.size() * bytes);
    locations.resize(hashes.size());
    cold_.read(hashes, records.data(), locations.data(), remember);
    for (std::size_t i = 0; i < hashes.size(); ++i)
      if (locations[i] != 0) {
        const std::byte* const record = records.data() + i * bytes;
        use(places[i], head_at(record), record + sizeof(RecordHead));
      }
    hashes.clear();
    places.clear();
  };
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (hot[i]) continue;
    hashes.push_back(mix(ids[i]));
    places.push_back(i);
    if (hashes.size() == kReadAtOnce) flush();
  }
  flush();
}

void TieredTable::lookup(std::span<const std::int64_t> ids, float* out) {
  const std::size_t dim = hot_->dim();
  std::vector<std::uint8_t> found(ids.size());
  const std::uint64_t moved = moved_in_.load();
  if (hot_->lookup(ids, out, found.data()) == ids.size()) return;
  each_cold(ids, found, true, [&](std::size_t i, const RecordHead&, const std::byte* row) {
    show(hot_->entry(), row, out + i * dim);
    found[i] = 1;
  });
  if (moved_in_.load() == moved) return;
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (!found[i]) lookup(ids.subspan(i, 1), out + i * dim);
}

void TieredTable::lookup_rows(std::span<const std::int64_t> ids, std::uint8_t* told, std::int64_t* times,
                              float* values, float* state) {
  const std::size_t dim = hot_->dim();
  const std::size_t state_dim = hot_->state_dim();
  const Entry& entry = hot_->entry();
  std::vector<std::uint8_t> found(ids.size());
  const std::uint64_t moved = moved_in_.load();
  hot_->lookup_rows(ids, found.data(), times, values, state);
  each_cold(ids, found, true, [&](std::size_t i, const RecordHead& head, const std::byte* row) {
    if (times != nullptr) times[i] = head.time;
    if (values != nullptr) entry.read(row, values + i * dim);
    if (state != nullptr) std::memcpy(state + i * state_dim, entry.state(row), state_dim * sizeof(float));
    found[i] = 1;
  });
  if (moved_in_.load() != moved)
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (!found[i])
        lookup_rows(ids.subspan(i, 1), &found[i], times != nullptr ? times + i : nullptr,
                    values != nullptr ? values + i * dim : nullptr,
                    state != nullptr ? state + i * state_dim : nullptr);
  if (told != nullptr) std::copy(found.begin(), found.end(), told);
}

Chunk TieredTable::scan_cold(std::uint64_t cursor, std::uint64_t last, std::size_t limit, bool of_snapshot,
                             bool changed_only, bool unlinked) {
  if (limit == 0) throw std::invalid_argument("scan: limit must be at least 1");
  const ColdChunk found =
      cold_.scan(cursor, last, limit, of_snapshot, unlinked, changed_only ? saved_.load() : 0);
  const std::size_t bytes = cold_.record_bytes();
  const std::size_t dim = hot_->dim();
  const std::size_t state_dim = hot_->state_dim();
  const std::size_t most = found.records.size() / bytes;
  Chunk chunk;
  chunk.ids.reset(new std::int64_t[most]);
  chunk.times.reset(new std::int64_t[most]);
  chunk.values.reset(new float[most * dim]);
  chunk.state.reset(new float[most * state_dim]);
  for (std::size_t i = 0; i < most; ++i) {
    const std::byte* const record = found.records.data() + i * bytes;
    const RecordHead head = head_at(record);
    if (changed_only && head.epoch <= saved_) continue;
    const std::byte* const row = record + sizeof(head);
    const std::size_t at = chunk.rows++;
    chunk.ids[at] = unmix(head.hash);
    chunk.times[at] = head.time;
    hot_->entry().read(row, chunk.values.get() + at * dim);
    std::memcpy(chunk.state.get() + at * state_dim, hot_->entry().state(row), state_dim * sizeof(float));
  }
  chunk.done = found.done;
  chunk.cursor = found.cursor;
  return chunk;
}

void TieredTable::digests(std::span<const std::int64_t> buckets, std::uint64_t number, std::uint64_t total,
                          std::uint64_t* sums) {
  hot_->digests(buckets, number, total, sums);
  constexpr int kShift = 64 - kBucketBits;
  const std::size_t dim = hot_->dim();
  for (std::size_t b = 0; b < buckets.size() && cold_.size() > 0; ++b) {
    const auto bucket = static_cast<std::uint64_t>(buckets[b]);
    const std::uint64_t last = (bucket << kShift) + ((std::uint64_t{1} << kShift) - 1);
    for (std::uint64_t cursor = bucket << kShift;;) {
      const Chunk chunk = scan_cold(cursor, last, kReadAtOnce, false, false);
      for (std::size_t i = 0; i < chunk.rows; ++i)
        if (static_cast<std::uint64_t>(chunk.ids[i]) % total == number)
          sums[b] += row_digest(chunk.ids[i], {chunk.values.get() + i * dim, dim});
      if (chunk.done) break;
      cursor = chunk.cursor;
    }
  }
}

// ---- moving --------------------------------------------------------------------------------------

std::size_t TieredTable::count_missing(std::span<const std::int64_t> ids) {
  std::vector<std::uint8_t> found(ids.size());
  hot_->count_uses(ids, found.data());
  missing_.clear();
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (!found[i]) missing_.push_back(mix(ids[i]));
  std::sort(missing_.begin(), missing_.end());
  missing_.erase(std::unique(missing_.begin(), missing_.end()), missing_.end());
  return missing_.size();
}

std::size_t TieredTable::move_out(std::size_t count) {
  std::vector<std::byte> records = hot_->idle_rows(count);
  if (records.empty()) return 0;
  const std::size_t bytes = cold_.record_bytes();
  std::vector<std::byte> kept = records;  // as the cold store is to have them
  for (std::size_t at = 0; at < kept.size(); at += bytes) {
    RecordHead head = head_at(kept.data() + at);
    head.epoch = epoch_of(head.epoch);
    std::memcpy(kept.data() + at, &head, sizeof(head));
  }
  cold_.append(kept);
  hot_->move_out(records);
  return records.size() / bytes;
}

std::size_t TieredTable::spill(std::size_t incoming) {
  const Room room = this->room();
  shrinks_ = room.over > 0 && room.held > room.rows &&
             (room.held - room.rows) * hot_->row_bytes() > spec_.memory_bytes / kStep;
  const std::uint64_t rows = hot_->size() + incoming;
  if (rows <= room.rows) return 0;
  // More than is missing, so that the next batches find room.
  const std::uint64_t wanted = rows - room.rows + room.rows / 64;
  // Less than half a buffer, for which there is room: idle_rows() may find somewhat more.
  const std::uint64_t some = std::max<std::uint64_t>(cold_.buffer_bytes() / cold_.record_bytes() * 3 / 8, 1);
  const std::size_t moved = move_out(std::min<std::uint64_t>({wanted, some, kMovedAtOnce}));
  return moved == 0 || moved >= rows - room.rows ? 0 : rows - room.rows - moved;
}

std::size_t TieredTable::bring(std::uint64_t elsewhere) {
  follow_lookups();
  const std::uint64_t rows = hot_->size() + cold_.size() + elsewhere;
  hot_->allow_new(most_rows_ - std::min(most_rows_, rows));
  std::size_t absent = missing_.size();
  if (absent == 0 || cold_.size() == 0) return absent;
  const std::size_t bytes = cold_.record_bytes();
  std::vector<std::byte> records;
  std::vector<std::uint64_t> locations;
  for (std::size_t at = 0; at < missing_.size(); at += kReadAtOnce) {
    const std::span<const std::uint64_t> hashes(missing_.data() + at,
                                                std::min(kReadAtOnce, missing_.size() - at));
    records.resize(hashes.size() * bytes);
    locations.resize(hashes.size());
    const ColdStore::Still still(cold_);
    cold_.read(hashes, records.data(), locations.data(), false);
    std::size_t count = 0;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      if (locations[i] == 0) continue;
      std::byte* const to = records.data() + count++ * bytes;
      if (to != records.data() + i * bytes) std::memcpy(to, records.data() + i * bytes, bytes);
      RecordHead head = head_at(to);
      head.epoch = change_of(head.epoch);
      std::memcpy(to, &head, sizeof(head));
    }
    if (count == 0) continue;
    absent -= count;
    hot_->move_in(std::span(records).first(count * bytes));
    moved_in_.fetch_add(1);  // before they leave: a reader that misses a row in both tiers sees this
    cold_.forget(hashes, locations.data());
  }
  missing_.clear();
  return absent;
}

std::size_t TieredTable::remove(std::span<const std::int64_t> ids) {
  follow_lookups();
  std::size_t removed = hot_->remove(ids);
  if (cold_.size() == 0) return removed;
  std::vector<std::uint64_t> hashes(ids.size());
  std::transform(ids.begin(), ids.end(), hashes.begin(), mix);
  std::sort(hashes.begin(), hashes.end());
  hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
  std::vector<std::byte> records;
  std::vector<std::uint64_t> locations, gone;
  for (std::size_t at = 0; at < hashes.size(); at += kReadAtOnce) {
    const auto some = std::span(hashes).subspan(at, std::min(kReadAtOnce, hashes.size() - at));
    records.resize(some.size() * cold_.record_bytes());
    locations.resize(some.size());
    const ColdStore::Still still(cold_);
    // Rows that were looked up just before are in memory still.
    cold_.read(some, records.data(), locations.data(), false);
    gone.clear();
    for (std::size_t i = 0; i < some.size(); ++i)
      if (locations[i] != 0) gone.push_back(some[i]);
    removed_ += cold_.forget(some, locations.data());
    removed += gone.size();
    hot_->note_removals_elsewhere(gone);
  }
  return removed;
}

// ---- expiry --------------------------------------------------------------------------------------

TieredTable::Expiry::Expiry(const TieredTable& table, std::int64_t now) : now_(now) {
  const std::int64_t newest =
      std::min<std::int64_t>(table.hot_->newest_expired(now), std::numeric_limits<std::uint32_t>::max());
  if (newest >= 0) walk_.emplace(static_cast<std::uint32_t>(newest));
}

bool TieredTable::find_expired(Expiry& expiry) {
  if (expiry.hot_) return true;
  expiry.positions_.clear();
  while (expiry.positions_.empty()) {
    if (!expiry.walk_ || !cold_.next(*expiry.walk_)) return false;
    const std::span<const RecordHead> heads = expiry.walk_->heads();
    for (std::size_t i = 0; i < heads.size(); ++i)
      if (hot_->expired(heads[i].hash, heads[i].time, expiry.now_))
        expiry.positions_.push_back(static_cast<std::uint32_t>(i));
  }
  return true;
}

std::size_t TieredTable::drop_expired(Expiry& expiry) {
  if (expiry.hot_) {
    const std::size_t count = hot_->evict_some(expiry.now_, expiry.cursor_, kExpiredAtOnce);
    expiry.hot_ = expiry.cursor_ != 0;
    return count;
  }
  std::vector<std::uint64_t> gone;
  cold_.forget(*expiry.walk_, expiry.positions_, gone);
  hot_->note_removals_elsewhere(gone);
  evicted_ += gone.size();
  return gone.size();
}

std::size_t TieredTable::count_expired(std::int64_t now) {
  std::size_t count = hot_->count_expired(now);
  Expiry expiry(*this, now);
  expiry.hot_ = false;
  while (find_expired(expiry)) count += cold_.alive(*expiry.walk_, expiry.positions_);
  return count;
}

// ---- whole tables, and what changed --------------------------------------------------------------

void TieredTable::clear(std::size_t rows) {
  if (snapshot_open_) throw std::invalid_argument("clear: a snapshot of this table is open; close it first");
  // Subscribers have to be told of cold rows by ID, as of hot ones.
  if (hot_->touches()) {
    std::vector<std::uint64_t> gone;
    for (std::uint64_t cursor = 0;;) {
      const ColdChunk chunk = cold_.scan(cursor, kLastHash, kReadAtOnce, false);
      gone.clear();
      for (std::size_t at = 0; at < chunk.records.size(); at += cold_.record_bytes())
        gone.push_back(hash_at(chunk.records.data() + at));
      hot_->note_removals_elsewhere(gone);
      if (chunk.done) break;
      cursor = chunk.cursor;
    }
  }
  hot_->clear(std::min<std::uint64_t>(rows, hot_rows_allowed()));
  cold_.clear();
  shrinks_ = false;
}

std::uint32_t TieredTable::epoch_of(std::uint32_t change) const {
  if (!tracked_ || change == kUnchanged) return 0;
  return epoch_ - (change == kChanged ? 0 : 1);
}

std::uint32_t TieredTable::change_of(std::uint32_t epoch) const {
  if (!tracked_ || epoch <= saved_) return kUnchanged;
  return snapshot_open_ && epoch < epoch_ ? kChangedBeforeSnapshot : kChanged;
}

void TieredTable::track_changes(bool on) {
  hot_->track_changes(on);
  saved_ = epoch_++;
  tracked_ = on;
}

std::size_t TieredTable::open_snapshot() {
  cold_.open_snapshot();
  snapshot_open_ = true;
  ++epoch_;
  return cold_.size();
}

void TieredTable::close_snapshot(bool saved) {
  if (!snapshot_open_.exchange(false)) return;
  if (saved) saved_ = epoch_ - 1;
  cold_.close_snapshot();
}

std::size_t TieredTable::adopt(const std::string& path, std::span<const std::uint8_t> alive) {
  std::vector<std::uint64_t> hashes;
  const auto note = [&](std::span<const RecordHead> heads) {
    std::uint32_t newest = 0;
    hashes.clear();
    for (const RecordHead& head : heads) {
      newest = std::max(newest, head.time);
      hashes.push_back(head.hash);
    }
    hot_->note_arrivals_elsewhere(hashes, newest);
  };
  const std::size_t rows = cold_.adopt(path, alive, epoch_of(kChanged), note);
  adopted_ += rows;
  return rows;
}

}  // namespace monolith
