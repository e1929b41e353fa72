// Writing: batches grouped by partition, applied in windows.
#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "prefetch.h"
#include "table_body.h"
#include "table_snapshot.h"

namespace monolith {
namespace {

constexpr int kMaxGroupBits = 14;
constexpr std::size_t kIndexAhead = 16;  // ids whose index lines are on their way
constexpr std::size_t kAdmitted = 32;    // ids that are admitted together

// How many of `run` ids to take next: windows of about one size, since a short one hardly begins before it
// ends.
inline std::size_t window_of(std::size_t run) {
  const std::size_t windows = (run + kWindow - 1) / kWindow;
  return (run + windows - 1) / windows;
}

inline std::uint64_t group_of(std::uint64_t hash, int bits) {
  return hash >> 1 >> (63 - bits);
}

}  // namespace

std::unique_ptr<Table::Batch> Table::borrow() {
  std::lock_guard lock(batches_mutex_);
  if (batches_.empty()) return std::make_unique<Batch>();
  auto batch = std::move(batches_.back());
  batches_.pop_back();
  return batch;
}

void Table::give_back(std::unique_ptr<Batch> batch) {
  std::lock_guard lock(batches_mutex_);
  batches_.push_back(std::move(batch));
}

void Table::advance_clock(std::size_t count, EventTimes times) {
  std::int64_t newest = times.all;
  if (times.each != nullptr) newest = *std::max_element(times.each, times.each + count);
  std::int64_t known = max_event_time_.load(std::memory_order_relaxed);
  while (newest > known && !max_event_time_.compare_exchange_weak(known, newest)) {
  }
}

// A stable counting sort by leading bits of the hash.
void Table::group(std::span<const std::int64_t> ids, Batch& batch) const {
  const std::size_t count = ids.size();
  // More groups only if the batch has several ids for each partition.
  const int useful = std::bit_width(count) - 2;
  const int bits = std::min(body_.load()->depth(), std::clamp(useful, 0, kMaxGroupBits));
  const std::size_t groups = std::size_t{1} << bits;
  Item* items = batch.items.ensure(count);
  const int threads = workers_ != nullptr ? workers_->at_hand() : 1;
  const std::size_t chunks = threads > 1 && count >= 16384 ? threads : 1;
  const std::size_t chunk = (count + chunks - 1) / chunks;
  batch.counts.assign(chunks * groups, 0);
  batch.starts.resize(groups + 1);

  const auto each_chunk = [&](auto&& work) { spread(count, chunk, work); };
  each_chunk([&](std::size_t begin, std::size_t end) {
    std::uint32_t* counts = batch.counts.data() + begin / chunk * groups;
    for (std::size_t i = begin; i < end; ++i) ++counts[group_of(mix(ids[i]), bits)];
  });
  std::uint32_t total = 0;
  for (std::size_t g = 0; g < groups; ++g) {
    batch.starts[g] = total;
    for (std::size_t c = 0; c < chunks; ++c) total += std::exchange(batch.counts[c * groups + g], total);
  }
  batch.starts[groups] = total;
  each_chunk([&](std::size_t begin, std::size_t end) {
    std::uint32_t* next_at = batch.counts.data() + begin / chunk * groups;
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t hash = mix(ids[i]);
      items[next_at[group_of(hash, bits)]++] = {hash, static_cast<std::uint32_t>(i), 1};
    }
  });
}

// Leaves one item per id in a run of groups, linked to its later sightings; returns where the run now ends.
std::size_t Table::merge_equal_ids(Batch& batch, std::size_t first_group, std::size_t last_group,
                                   EventTimes merged) const {
  Item* items = batch.items.data();
  std::uint32_t* next = batch.next.data();
  std::vector<std::uint32_t> heads;
  std::vector<std::uint32_t> tails;
  std::size_t out = batch.starts[first_group];
  for (std::size_t g = first_group; g < last_group; ++g) {
    const std::size_t begin = batch.starts[g];
    const std::size_t end = batch.starts[g + 1];
    const std::size_t slots = std::bit_ceil(2 * (end - begin) + 1);
    heads.assign(slots, UINT32_MAX);
    tails.resize(end - begin);
    const std::size_t first = out;
    for (std::size_t i = begin; i < end; ++i) {
      const Item item = items[i];
      std::size_t at = item.hash & (slots - 1);
      while (heads[at] != UINT32_MAX && items[first + heads[at]].hash != item.hash)
        at = (at + 1) & (slots - 1);
      if (heads[at] == UINT32_MAX) {
        heads[at] = static_cast<std::uint32_t>(out - first);
        tails[out - first] = item.position;
        items[out++] = item;
      } else {
        ++items[first + heads[at]].count;
        next[tails[heads[at]]] = item.position;
        tails[heads[at]] = item.position;
        const std::uint32_t head = items[first + heads[at]].position;
        if (merged.each != nullptr)
          batch.times.data()[head] = std::max(batch.times.data()[head], batch.times.data()[item.position]);
        if (merged.counts != nullptr) {
          const std::uint64_t sum = std::uint64_t{merged.counts[head]} + merged.counts[item.position];
          batch.sightings.data()[head] = static_cast<std::uint32_t>(std::min<std::uint64_t>(sum, UINT32_MAX));
        }
      }
    }
  }
  return out;
}

// At most kAdmitted ids of which some have no row yet: asks the filter in order, grows the partition for
// those it admits, and looks all ids up again, because growth may have moved the index.
void Table::admit(Body& body, Partition& part, const Item* items, std::size_t count, EventTimes times,
                  OnAbsent absent, std::byte** rows, bool* fresh) {
  bool refused[kAdmitted] = {};
  std::uint64_t new_ids[kAdmitted];  // hashes
  std::size_t new_count = 0;
  std::uint32_t latest = 0;
  const Index before = part.index.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < count; ++i) {
    latest = std::max(latest, times.at(items[i].position));
    if (before.find(items[i].hash) == nullptr &&
        std::find(new_ids, new_ids + new_count, items[i].hash) == new_ids + new_count) {
      const std::uint32_t seen = times.counts != nullptr ? times.count(items[i].position) : items[i].count;
      if (absent == OnAbsent::kAsk && admission_ != nullptr &&
          admission_->refuses(unmix(items[i].hash), seen)) {
        refused[i] = true;
        part.filtered += seen;
      } else {
        new_ids[new_count++] = items[i].hash;
      }
    }
  }
  if (hot_tier_)
    new_count = std::min<std::uint64_t>(
        new_count, std::max<std::int64_t>(new_allowed_.load(std::memory_order_relaxed), 0));
  if (new_count > 0) grow_for(body, part, static_cast<std::uint32_t>(new_count), latest);
  const std::uint32_t mask = time_mask(absent);
  for (std::size_t i = 0; i < count; ++i) {
    rows[i] = nullptr;
    fresh[i] = false;
    if (refused[i]) continue;
    const std::uint32_t time = times.at(items[i].position);
    Slot* slot = part.index.load(std::memory_order_relaxed).find(items[i].hash);
    if (slot == nullptr) {
      slot = take_allowance() ? insert(body, part, items[i].hash, time) : nullptr;
      if (slot == nullptr) {
        ++part.refused;
        refused_.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      fresh[i] = true;
    } else {
      poke(slot->time, std::max(slot->time & mask, time));
    }
    rows[i] = body.rows.row(slot->row);
  }
}

// Finds the slots and rows of `count` ids of a partition whose lock is held, and says whether all have one;
// the slots of others are null. `run` ids from `items` on are this partition's, and `left` are still to come
// in all.
bool Table::find_rows(const Body& body, Index index, const Item* items, std::size_t count, std::size_t run,
                      std::size_t left, Slot** slots, std::byte** rows) {
  const RowArenas::Finder row_at(body.rows);
  static_assert(kWindow <= 256);
  std::uint8_t late[kWindow + 1];  // those to be sought in the next line; one more is written than counts
  std::size_t late_count = 0;
  bool all_there = true;
  const auto look = [&](std::size_t i, Slot* bucket) __attribute__((always_inline)) {
    Slot* const slot = Index::nearest(bucket, items[i].hash);
    const std::uint32_t row = slot->row;
    const bool missed = slot->hash != items[i].hash;
    slots[i] = slot;
    rows[i] = row_at(row);
    __builtin_prefetch(slot + missed, 1);
    late[late_count] = static_cast<std::uint8_t>(i);
    late_count += missed;
    if (row == 0) [[unlikely]] {
      late_count -= missed;
      slots[i] = nullptr;
      all_there = false;
    }
  };
  const std::size_t near_end = run - std::min(run, kIndexAhead);
  std::size_t i = 0;
  for (; i < std::min(count, near_end); ++i) {
    index.prefetch<1>(items[i + kIndexAhead].hash);
    look(i, index.bucket_of(items[i].hash));
  }
  for (; i < count; ++i) {
    if (i + kIndexAhead < left) body.prefetch<1>(items[i + kIndexAhead].hash);
    look(i, index.bucket_of(items[i].hash));
  }
  while (late_count > 0) {  // an index is never full, so this ends
    const std::size_t again = std::exchange(late_count, 0);
    for (std::size_t l = 0; l < again; ++l) look(late[l], index.behind(slots[late[l]]));
  }
  return all_there;
}

// The first ids of a run of one partition whose lock is held. Returns how many.
template <class Work>
std::size_t Table::write_window(Body& body, Partition& part, const Item* items, std::size_t run,
                                std::size_t left, const Writes& writes, const Work& work) {
  const std::size_t count = window_of(run);
  Slot* slots[kWindow];
  std::byte* rows[kWindow];
  const Index index = part.index.load(std::memory_order_relaxed);
  const bool all_there = find_rows(body, index, items, count, run, left, slots, rows);
  if (watched())
    for (std::size_t i = 0; i < count; ++i)
      if (slots[i] != nullptr) note_change(body, part, *slots[i]);
  Change change(part);
  if (all_there) {
    for (std::size_t i = 0; i < std::min(count, kRowsAhead); ++i) {  // on their way while times are written
      prefetch<1>(rows[i], entry_.row_bytes());
      work.fetch(items[i].position);
    }
    const EventTimes times = writes.times;  // a copy, which no store to a slot can change
    const std::uint32_t mask = time_mask(writes.absent);
    for (std::size_t i = 0; i < count; ++i)
      poke(slots[i]->time, std::max(slots[i]->time & mask, times.at(items[i].position)));
    work(rows, nullptr, items, count, writes);
  } else {
    // A few at a time, each few written before the next are admitted: admission to a full table expires old
    // rows, which may be among them.
    for (std::size_t i = 0; i < count; i += kAdmitted) {
      const std::size_t few = std::min(kAdmitted, count - i);
      bool fresh[kAdmitted];
      admit(body, part, items + i, few, writes.times, writes.absent, rows + i, fresh);
      work(rows + i, fresh, items + i, few, writes);
    }
  }
  if (writes.touched != nullptr)
    for (std::size_t i = 0; i < count; ++i)
      if (rows[i] != nullptr) writes.touched->push_back(unmix(items[i].hash));
  return count;
}

template <class Work>
void Table::write_items(Body& body, const Batch& batch, std::size_t begin, std::size_t end, EventTimes times,
                        OnAbsent absent, const Work& work) {
  const Item* items = batch.items.data();
  std::vector<float> scratch(work.scratch_floats());
  std::vector<std::int64_t> touched;
  const Writes writes{times, absent, touched_.empty() ? nullptr : &touched, batch.next.data(),
                      scratch.data()};
  for (std::size_t at = begin; at < end;) {
    epochs_.collect();  // frees indexes that were replaced and that no reader can still see
    const Epochs::Visit visit(epochs_);
    if (at == begin)
      for (std::size_t i = at; i < std::min(end, at + kIndexAhead); ++i) body.prefetch<1>(items[i].hash);
    Partition* const part = body.route(items[at].hash);
    std::lock_guard lock(part->mutex);
    const std::uint64_t first = part->first.load(std::memory_order_relaxed);
    const std::uint64_t width = part->last.load(std::memory_order_relaxed) - first;
    std::size_t run = 0;
    while (at + run < end && items[at + run].hash - first <= width) ++run;
    // An empty run: the partition split while we waited for its lock. After a split of our own the rest is
    // routed again; so it is after a resize, because the old index counts towards the budget until this
    // thread's visit ends.
    while (run > 0) {
      const std::size_t done = write_window(body, *part, items + at, run, end - at, writes, work);
      at += done;
      run -= done;
      if (part->rows > part->split_at) {
        split(body, *part);
        break;
      }
      if (epochs_.pending()) break;
    }
  }
  tell_touched(touched);
}

template <class Work>
void Table::write(std::span<const std::int64_t> ids, EventTimes times, OnAbsent absent, bool dedup,
                  const Work& work) {
  if (ids.empty()) return;
  if (ids.size() >= UINT32_MAX) throw std::invalid_argument("table: at most 2^32 - 2 ids in one call");
  Writing writing(*this);
  Body& body = *body_.load();
  auto batch = borrow();
  group(ids, *batch);
  if (dedup) {
    batch->next.ensure(ids.size());
    if (times.each != nullptr) {  // a copy, in which equal ids come to share the latest of their times
      std::uint32_t* merged = batch->times.ensure(ids.size());
      std::copy_n(times.each, ids.size(), merged);
      times.each = merged;
    }
    if (times.counts != nullptr) {  // the same, with the sum of their counts
      std::uint32_t* merged = batch->sightings.ensure(ids.size());
      std::copy_n(times.counts, ids.size(), merged);
      times.counts = merged;
    }
  }

  each_run(*batch, ids.size(), [&](std::size_t first, std::size_t last) {
    const std::size_t begin = batch->starts[first];
    const std::size_t end = dedup ? merge_equal_ids(*batch, first, last, times) : batch->starts[last];
    write_items(body, *batch, begin, end, times, absent, work);
  });
  advance_clock(ids.size(), times);
  give_back(std::move(batch));
}

// ---- what is done to rows ------------------------------------------------------------------------

namespace {

// Works are called with a window of ids, their rows, null where there is none, and which of them are fresh:
// none when `fresh` is null, and then all have rows.

// Calls work.one for the rows there are, each asked for well before.
template <class Work, class Item, class Writes>
void one_by_one(const Work& work, std::byte* const* rows, const bool* fresh, const Item* items,
                std::size_t count, const Writes& writes) {
  const auto fetch = [&](std::size_t i) {
    if (rows[i] != nullptr) prefetch<1>(rows[i], work.entry.row_bytes());
    work.fetch(items[i].position);
  };
  for (std::size_t i = 0; i < std::min(count, kRowsAhead); ++i) fetch(i);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) fetch(i + kRowsAhead);
    if (rows[i] != nullptr) work.one(rows[i], fresh != nullptr && fresh[i], items[i], writes);
  }
}

struct Assign {
  const Entry& entry;
  const float* values;
  std::size_t dim;
  std::size_t scratch_floats() const { return 0; }
  void fetch(std::uint32_t position) const { prefetch<0>(values + position * dim, dim * sizeof(float)); }
  template <class Item, class Writes>
  void one(std::byte* row, bool fresh, const Item& item, const Writes&) const {
    if (fresh)
      entry.initialize_state(row);
    else if (entry.decays_lazily())
      entry.catch_up(row);
    entry.write(row, values + item.position * dim);
  }
  void operator()(const auto&... window) const { one_by_one(*this, window...); }
};

struct AssignAdd {
  const Entry& entry;
  const float* values;
  std::size_t dim;
  std::size_t scratch_floats() const { return dim; }
  void fetch(std::uint32_t position) const { prefetch<0>(values + position * dim, dim * sizeof(float)); }
  template <class Item, class Writes>
  void one(std::byte* row, bool fresh, const Item& item, const Writes& writes) const {
    if (fresh)
      entry.initialize(row, unmix(item.hash));
    else if (entry.decays_lazily())
      entry.catch_up(row);
    float* const sum = writes.scratch;
    entry.read(row, sum);
    const float* more = values + item.position * dim;
    for (std::size_t i = 0; i < dim; ++i) sum[i] += more[i];
    entry.write(row, sum);
  }
  void operator()(const auto&... window) const { one_by_one(*this, window...); }
};

struct Train {
  const Entry& entry;
  const float* gradients;
  const float* latest;
  const float* rates;
  std::int64_t step;
  std::size_t dim;
  bool dedup;
  StepKernels plain;  // the whole step, when all segments take it alike and there is nothing around it
  std::atomic<std::uint64_t>* non_finite;

  std::size_t scratch_floats() const {
    if (plain.one == nullptr) return 3 * dim + entry.row_bytes() / sizeof(float);
    return summed_floats() + (entry.stores_floats() ? 0 : dim);
  }
  std::size_t summed_floats() const { return dedup ? kWindow * dim : 0; }
  void fetch(std::uint32_t position) const { prefetch<0>(gradients + position * dim, dim * sizeof(float)); }

  // The gradient of an id, or the sum of its gradients, put into `sum`.
  template <class Item>
  const float* gradient_of(const Item& item, const std::uint32_t* next, float* sum) const {
    const float* const first = gradients + item.position * dim;
    if (item.count == 1) [[likely]]
      return first;
    std::copy_n(first, dim, sum);
    std::uint32_t position = item.position;
    for (std::uint32_t i = 1; i < item.count; ++i) {
      position = next[position];
      const float* more = gradients + position * dim;
      for (std::size_t j = 0; j < dim; ++j) sum[j] += more[j];
    }
    return sum;
  }

  template <class Item, class Writes>
  void one(std::byte* row, bool fresh, const Item& item, const Writes& writes) const {
    const std::int64_t id = unmix(item.hash);
    if (fresh) entry.initialize(row, id);
    const float* gradient = gradient_of(item, writes.next, writes.scratch + dim);
    const float* seen = latest != nullptr ? latest + item.position * dim : nullptr;
    float* const stepped = writes.scratch + 2 * dim;
    entry.read(row, stepped);
    // The state is stepped where it is: it must be put back if the values do not stay finite.
    float* const before = stepped + dim;
    const std::size_t state_bytes = entry.state_dim() * sizeof(float);
    std::memcpy(before, entry.state(row), state_bytes);
    entry.step(stepped, entry.state(row), id, gradient, seen, rates, step, writes.scratch);
    if (finite(stepped, dim)) [[likely]] {
      entry.write_stepped(row, item.hash, stepped, step);
    } else {
      std::memcpy(entry.state(row), before, state_bytes);
      non_finite->fetch_add(1, std::memory_order_relaxed);
    }
  }

  template <class Item, class Writes>
  void operator()(std::byte* const* rows, const bool* fresh, const Item* items, std::size_t count,
                  const Writes& writes) const {
    if (plain.one == nullptr) {
      one_by_one(*this, rows, fresh, items, count, writes);
      return;
    }
    const float* by[kWindow];
    std::uint64_t hashes[kWindow];  // for rows that are rounded
    const bool in_place = entry.stores_floats();
    const auto step_all = [&](std::byte* const* all, std::size_t n) {
      if (in_place)
        plain.many(entry.plain_spec(), all, entry.row_bytes(), by, n, static_cast<int>(dim), rates[0], step);
      else
        entry.step_rounded(all, hashes, by, n, rates[0], step, writes.scratch + summed_floats());
    };
    if (fresh == nullptr) {
      if (!in_place)
        for (std::size_t i = 0; i < count; ++i) hashes[i] = items[i].hash;
      if (dedup)
        for (std::size_t i = 0; i < count; ++i)
          by[i] = gradient_of(items[i], writes.next, writes.scratch + i * dim);
      else
        for (std::size_t i = 0; i < count; ++i) by[i] = gradients + items[i].position * dim;
      step_all(rows, count);
      return;
    }
    std::byte* there[kWindow];
    std::size_t n = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (rows[i] == nullptr) continue;
      if (fresh[i]) entry.initialize(rows[i], unmix(items[i].hash));
      there[n] = rows[i];
      hashes[n] = items[i].hash;
      by[n] = gradient_of(items[i], writes.next, writes.scratch + n * dim);
      ++n;
    }
    step_all(there, n);
  }
};

struct Reinitialize {
  const Entry& entry;
  std::int8_t* status;
  std::size_t scratch_floats() const { return 0; }
  void fetch(std::uint32_t) const {}
  template <class Item, class Writes>
  void one(std::byte* row, bool fresh, const Item& item, const Writes&) const {
    entry.initialize(row, unmix(item.hash));
    status[item.position] = fresh ? 0 : 1;
  }
  void operator()(const auto&... window) const { one_by_one(*this, window...); }
};

struct Restore {
  const Entry& entry;
  const float* values;
  const float* state;
  const std::uint8_t* fresh_state;
  std::size_t dim;
  std::size_t state_dim;
  std::size_t scratch_floats() const { return 0; }
  void fetch(std::uint32_t position) const { prefetch<0>(values + position * dim, dim * sizeof(float)); }
  template <class Item, class Writes>
  void one(std::byte* row, bool, const Item& item, const Writes&) const {
    entry.write(row, values + item.position * dim);
    if (state == nullptr || (fresh_state != nullptr && fresh_state[item.position]))
      entry.initialize_state(row);
    else
      std::memcpy(entry.state(row), state + item.position * state_dim, state_dim * sizeof(float));
  }
  void operator()(const auto&... window) const { one_by_one(*this, window...); }
};

}  // namespace

// Calls put(begin, end) for the rows to write. A table that skips zeros removes those it finds on the way, in
// order, since an id may be in several runs.
template <class Put>
void Table::without_zeros(std::span<const std::int64_t> ids, const float* values, Put&& put) {
  const std::size_t dim = entry_.dim();
  if (!spec_.skip_zero) {
    put(std::size_t{0}, ids.size());
    return;
  }
  const auto is_zero = [&](std::size_t i) {
    float square = 0;
    for (std::size_t j = 0; j < dim; ++j) square += values[i * dim + j] * values[i * dim + j];
    return square < std::numeric_limits<float>::min();
  };
  for (std::size_t begin = 0; begin < ids.size();) {
    const bool zero = is_zero(begin);
    std::size_t end = begin + 1;
    while (end < ids.size() && is_zero(end) == zero) ++end;
    if (zero)
      remove(ids.subspan(begin, end - begin));
    else
      put(begin, end);
    begin = end;
  }
}

void Table::assign(std::span<const std::int64_t> ids, const float* values, EventTimes times) {
  const std::size_t dim = entry_.dim();
  without_zeros(ids, values, [&](std::size_t begin, std::size_t end) {
    write(ids.subspan(begin, end - begin), times.from(begin), OnAbsent::kAsk, false,
          Assign{entry_, values + begin * dim, dim});
  });
}

void Table::assign_add(std::span<const std::int64_t> ids, const float* values, EventTimes times) {
  write(ids, times, OnAbsent::kAsk, false, AssignAdd{entry_, values, static_cast<std::size_t>(dim())});
}

void Table::apply_gradients(std::span<const std::int64_t> ids, const float* gradients, const float* latest,
                            std::span<const float> rates, std::int64_t step, EventTimes times, bool dedup) {
  if (entry_.serving()) throw std::invalid_argument("apply_gradients: a serving table has no optimizer");
  if (static_cast<int>(rates.size()) != entry_.segments())
    throw std::invalid_argument("apply_gradients: one learning rate per segment is needed");
  if (entry_.delay_compensated() && latest == nullptr)
    throw std::invalid_argument("apply_gradients: a delay-compensated segment needs latest_values");
  if (entry_.counts_steps() && step < 0)
    throw std::invalid_argument("apply_gradients: an optimizer that counts steps needs one of 0 or more");
  entry_.begin_step(step, rates.data());
  const auto dim = static_cast<std::size_t>(entry_.dim());
  const auto train = [&](std::span<const std::int64_t> some, const float* by, const float* seen,
                         EventTimes at) {
    write(some, at, OnAbsent::kAsk, dedup,
          Train{entry_, by, seen, rates.data(), step, dim, dedup, entry_.plain_kernels(rates), &non_finite_});
  };
  if (all_usable(gradients, ids.size() * dim)) [[likely]] {
    train(ids, gradients, latest, times);
    return;
  }
  std::vector<std::int64_t> kept;
  std::vector<float> by, seen;
  std::vector<std::uint32_t> each, counts;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const float* const gradient = gradients + i * dim;
    if (!usable(gradient, dim)) continue;
    kept.push_back(ids[i]);
    by.insert(by.end(), gradient, gradient + dim);
    if (latest != nullptr) seen.insert(seen.end(), latest + i * dim, latest + (i + 1) * dim);
    each.push_back(times.at(i));
    counts.push_back(times.count(i));
  }
  non_finite_.fetch_add(ids.size() - kept.size(), std::memory_order_relaxed);
  train(kept, by.data(), latest != nullptr ? seen.data() : nullptr,
        {times.all, times.each != nullptr ? each.data() : nullptr,
         times.counts != nullptr ? counts.data() : nullptr});
}

// Looked at in one go before anything is trained, since each instruction among the steps themselves is felt.
bool Table::all_usable(const float* gradients, std::size_t count) const {
  constexpr std::size_t kGrain = 1 << 16;
  if (count <= kGrain) return usable(gradients, count);
  std::atomic<bool> all{true};
  spread(count, kGrain, [&](std::size_t begin, std::size_t end) {
    if (!usable(gradients + begin, end - begin)) all.store(false, std::memory_order_relaxed);
  });
  return all.load();
}

void Table::reinitialize(std::span<const std::int64_t> ids, std::uint32_t now, std::int8_t* status) {
  std::fill_n(status, ids.size(), std::int8_t{-1});
  write(ids, {now}, OnAbsent::kCreate, false, Reinitialize{entry_, status});
}

void Table::restore(std::span<const std::int64_t> ids, const std::uint32_t* times, const float* values,
                    const float* state, const std::uint8_t* fresh_state) {
  const std::size_t dim = entry_.dim();
  const std::size_t state_dim = entry_.state_dim();
  if (entry_.decays_lazily() && state != nullptr)
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (fresh_state == nullptr || !fresh_state[i]) entry_.note_steps(state + i * state_dim);
  without_zeros(ids, values, [&](std::size_t begin, std::size_t end) {
    write(ids.subspan(begin, end - begin), {0, times + begin}, OnAbsent::kCreate, false,
          Restore{entry_, values + begin * dim, state != nullptr ? state + begin * state_dim : nullptr,
                  fresh_state != nullptr ? fresh_state + begin : nullptr, dim, state_dim});
  });
}

std::size_t Table::remove(std::span<const std::int64_t> ids) {
  Writing writing(*this);
  const Epochs::Visit visit(epochs_);
  Body& body = *body_.load();
  std::size_t removed = 0;
  std::vector<std::uint64_t> gone;
  for (const std::int64_t id : ids) {
    const std::uint64_t hash = mix(id);
    for (;;) {
      Partition& part = *body.route(hash);
      std::lock_guard lock(part.mutex);
      if (!part.owns(hash)) continue;
      const Index index = part.index.load(std::memory_order_relaxed);
      if (Slot* slot = index.find(hash)) {
        if (removals_matter()) {
          note_change(body, part, *slot);
          gone.push_back(hash);
        }
        Change change(part);
        free_row(body, part, slot->row);
        index.erase(slot);
        --part.rows;
        ++part.removed;
        ++removed;
      }
      break;
    }
  }
  note_removals(gone);
  return removed;
}

void Table::take(std::span<const std::int64_t> ids, std::int64_t* times, float* values, float* state) {
  if (ids.empty()) return;
  if (ids.size() >= UINT32_MAX) throw std::invalid_argument("table: at most 2^32 - 2 ids in one call");
  Writing writing(*this);
  Body& body = *body_.load();
  auto batch = borrow();
  group(ids, *batch);
  each_run(*batch, ids.size(), [&](std::size_t first, std::size_t last) {
    const std::size_t begin = batch->starts[first];
    take_items(body, batch->items.data() + begin, batch->starts[last] - begin, times, values, state);
  });
  give_back(std::move(batch));
}

void Table::take_items(Body& body, const Item* items, std::size_t count, std::int64_t* times, float* values,
                       float* state) {
  const std::size_t dim = entry_.dim();
  const std::size_t state_dim = entry_.state_dim();
  std::vector<std::uint64_t> gone;  // if anything follows removals
  for (std::size_t at = 0; at < count;) {
    const Epochs::Visit visit(epochs_);
    if (at == 0)
      for (std::size_t i = 0; i < std::min(count, kIndexAhead); ++i) body.prefetch<1>(items[i].hash);
    Partition& part = *body.route(items[at].hash);
    std::lock_guard lock(part.mutex);
    const std::uint64_t first = part.first.load(std::memory_order_relaxed);
    const std::uint64_t width = part.last.load(std::memory_order_relaxed) - first;
    std::size_t run = 0;  // 0 if the partition split while we waited for its lock
    while (at + run < count && items[at + run].hash - first <= width) ++run;
    while (run > 0) {
      const std::size_t some = window_of(run);
      const Item* const window = items + at;
      Slot* slots[kWindow];
      std::byte* rows[kWindow];
      const Index index = part.index.load(std::memory_order_relaxed);
      find_rows(body, index, window, some, run, count - at, slots, rows);
      const auto fetch = [&](std::size_t i) {
        if (slots[i] != nullptr) prefetch<1>(rows[i], entry_.row_bytes());
      };
      for (std::size_t i = 0; i < std::min(some, kRowsAhead); ++i) fetch(i);
      for (std::size_t i = 0; i < some; ++i) {
        if (i + kRowsAhead < some) fetch(i + kRowsAhead);
        const std::size_t to = window[i].position;
        if (slots[i] == nullptr) {
          times[to] = 0;
          std::fill_n(values + to * dim, dim, 0.0f);
          std::fill_n(state + to * state_dim, state_dim, 0.0f);
          continue;
        }
        times[to] = slots[i]->time;
        entry_.read(rows[i], values + to * dim);
        std::memcpy(state + to * state_dim, entry_.state(rows[i]), state_dim * sizeof(float));
        if (!removals_matter()) continue;
        note_change(body, part, *slots[i]);
        gone.push_back(window[i].hash);
      }
      // Only now: a slot that is erased makes others move up.
      Change change(part);
      for (std::size_t i = 0; i < some; ++i) {
        Slot* const slot = slots[i] != nullptr ? index.find(window[i].hash) : nullptr;
        if (slot == nullptr) continue;  // an id that came twice
        free_row(body, part, slot->row);
        index.erase(slot);
        --part.rows;
        ++part.removed;
      }
      at += some;
      run -= some;
    }
  }
  note_removals(gone);
}

}  // namespace monolith
