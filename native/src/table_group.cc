#include "table_group.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "distinct_ids.h"
#include "hash.h"

namespace monolith {
namespace {

[[noreturn]] void refuse(const std::string& what, std::uint64_t wanted, std::uint64_t found) {
  throw std::invalid_argument(what + ": expected " + std::to_string(wanted) + ", got " +
                              std::to_string(found));
}

// Stands in for the latest values of no ids, since a table takes null for values not given.
constexpr float kNothing = 0;

// Brings the pieces that one table has in a column together, in shard order. A single piece is left
// where it is.
template <class T>
class Gather {
 public:
  std::span<const T> operator()(std::span<const T> column, std::span<const std::int64_t> offsets,
                                std::size_t table, std::size_t tables) {
    std::span<const T> only;
    std::size_t total = 0, pieces = 0;
    const auto each = [&](auto&& use) {
      for (std::size_t piece = table; piece + 1 < offsets.size(); piece += tables) {
        const auto size = static_cast<std::size_t>(offsets[piece + 1] - offsets[piece]);
        if (size > 0) use(column.subspan(static_cast<std::size_t>(offsets[piece]), size));
      }
    };
    each([&](std::span<const T> piece) {
      only = piece;
      total += piece.size();
      ++pieces;
    });
    if (pieces < 2) return only;
    copy_ = std::make_unique_for_overwrite<T[]>(total);
    T* end = copy_.get();
    each([&](std::span<const T> piece) { end = std::copy(piece.begin(), piece.end(), end); });
    return {copy_.get(), total};
  }

 private:
  std::unique_ptr<T[]> copy_;
};

}  // namespace

FusedOffsets fused_offsets(std::span<const std::int64_t> dims, std::span<const std::int64_t> sizes,
                           std::size_t num_shards, std::size_t num_ids) {
  if (num_shards == 0) throw std::invalid_argument("num_shards must be at least 1");
  if (sizes.size() % num_shards != 0 || sizes.size() / num_shards != dims.size())
    refuse("sizes must have one entry per shard and table", num_shards * dims.size(), sizes.size());
  FusedOffsets offsets;
  offsets.ids.reserve(sizes.size() + 1);
  offsets.floats.reserve(sizes.size() + 1);
  offsets.recv_splits.reserve(num_shards);
  std::int64_t ids = 0, floats = 0;
  offsets.ids.push_back(0);
  offsets.floats.push_back(0);
  for (std::size_t shard = 0; shard < num_shards; ++shard) {
    const std::int64_t before = floats;
    for (std::size_t table = 0; table < dims.size(); ++table) {
      const std::int64_t size = sizes[shard * dims.size() + table];
      const std::int64_t dim = dims[table];
      if (size < 0) throw std::invalid_argument("sizes must be 0 or more, got " + std::to_string(size));
      if (dim < 1) throw std::invalid_argument("dims must be 1 or more, got " + std::to_string(dim));
      // Both sums stay in range: what is refused here could not be in memory.
      if (size > static_cast<std::int64_t>(num_ids) - ids)
        throw std::invalid_argument("sizes add up to more than the " + std::to_string(num_ids) +
                                    " ids given");
      if (size > (std::numeric_limits<std::int64_t>::max() - floats) / dim)
        throw std::invalid_argument("sizes and dims describe more floats than can be");
      offsets.ids.push_back(ids += size);
      offsets.floats.push_back(floats += size * dim);
    }
    offsets.recv_splits.push_back(floats - before);
  }
  if (static_cast<std::size_t>(ids) != num_ids)
    refuse("sizes must add up to the number of ids", num_ids, ids);
  return offsets;
}

TableGroup::TableGroup(std::vector<std::shared_ptr<Table>> tables, std::shared_ptr<Workers> workers)
    : tables_(std::move(tables)),
      workers_(std::move(workers)),
      reading_(workers_ != nullptr ? workers_->threads() : 1),
      training_(workers_ != nullptr ? workers_->threads() : 1) {
  dims_.reserve(tables_.size());
  for (const auto& table : tables_) {
    if (table == nullptr) throw std::invalid_argument("a group needs tables, got none in its place");
    dims_.push_back(table->dim());
  }
}

FusedOffsets TableGroup::offsets(std::span<const std::int64_t> sizes, std::size_t num_shards,
                                 std::size_t num_ids) const {
  return fused_offsets(dims_, sizes, num_shards, num_ids);
}

void TableGroup::lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
                        std::size_t num_shards, std::span<float> out) const {
  const FusedOffsets at = offsets(sizes, num_shards, ids.size());
  if (out.size() != static_cast<std::size_t>(at.floats.back()))
    refuse("out must hold dim floats per id", at.floats.back(), out.size());
  const MeasuredCall call(workers_.get(), reading_, ids.size());
  each(sizes.size(), [&](std::size_t piece) {
    if (sizes[piece] > 0)
      tables_[piece % tables_.size()]->lookup(ids.subspan(at.ids[piece], sizes[piece]),
                                              out.data() + at.floats[piece]);
  });
}

void TableGroup::each(std::size_t tasks, const std::function<void(std::size_t)>& work) const {
  if (workers_ != nullptr && tasks > 1)
    workers_->run(tasks, work);
  else
    for (std::size_t task = 0; task < tasks; ++task) work(task);
}

void TableGroup::check(const Gradients& gradients, const FusedOffsets& at) const {
  const auto floats = static_cast<std::size_t>(at.floats.back());
  const auto ids = static_cast<std::size_t>(at.ids.back());
  if (gradients.values.size() != floats)
    refuse("gradients must hold dim floats per id", floats, gradients.values.size());
  if (!gradients.latest.empty() && gradients.latest.size() != floats)
    refuse("latest values must hold dim floats per id", floats, gradients.latest.size());
  if (gradients.times.size() != 1 && gradients.times.size() != ids)
    refuse("event times must be one, or one per id", ids, gradients.times.size());
  if (!gradients.counts.empty() && gradients.counts.size() != ids)
    refuse("counts must be one per id", ids, gradients.counts.size());
  std::size_t segments = 0;
  for (const auto& table : tables_) {
    const Entry& entry = table->entry();
    segments += entry.segments();
    if (entry.serving()) throw std::invalid_argument("a serving table takes no gradients");
    if (entry.delay_compensated() && gradients.latest.empty() && floats > 0)
      throw std::invalid_argument("a delay-compensated segment needs latest values");
    if (entry.counts_steps() && gradients.step < 0)
      throw std::invalid_argument("batch_softmax needs a step of 0 or more");
  }
  if (gradients.rates.size() != segments)
    refuse("learning rates must be one per segment, table after table", segments, gradients.rates.size());
}

void TableGroup::apply_gradients(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
                                 std::size_t num_shards, const Gradients& gradients) const {
  const FusedOffsets at = offsets(sizes, num_shards, ids.size());
  check(gradients, at);
  const std::size_t count = tables_.size();
  std::vector<std::size_t> rates;  // where each table's begin
  std::size_t segments = 0;
  for (const auto& table : tables_) {
    rates.push_back(segments);
    segments += table->entry().segments();
  }
  const MeasuredCall call(workers_.get(), training_, ids.size());
  each(count, [&](std::size_t k) {
    Table& table = *tables_[k];
    Gather<std::int64_t> gather_ids;
    Gather<float> gather_values, gather_latest;
    Gather<std::uint32_t> gather_times, gather_counts;
    EventTimes times;
    if (gradients.times.size() == 1)
      times.all = gradients.times[0];
    else
      times.each = gather_times(gradients.times, at.ids, k, count).data();
    if (!gradients.counts.empty()) times.counts = gather_counts(gradients.counts, at.ids, k, count).data();
    const float* latest = nullptr;
    if (table.entry().delay_compensated()) {
      const auto gathered = gather_latest(gradients.latest, at.floats, k, count);
      latest = gathered.empty() ? &kNothing : gathered.data();
    }
    table.apply_gradients(gather_ids(ids, at.ids, k, count),
                          gather_values(gradients.values, at.floats, k, count).data(), latest,
                          gradients.rates.subspan(rates[k], table.entry().segments()), gradients.step, times,
                          gradients.dedup);
  });
}

FoundRows TableGroup::find(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes) const {
  const FusedOffsets at = offsets(sizes, 1, ids.size());
  const std::size_t count = tables_.size();
  FoundRows rows{std::vector<std::vector<std::int64_t>>(count), std::vector<std::int64_t>(count),
                 std::vector<std::int64_t>(count)};
  each(count, [&](std::size_t k) {
    const auto own = ids.subspan(at.ids[k], sizes[k]);
    if (own.empty()) return;
    // Distinct ids first: those of a skewed stream repeat, and the set of a batch stays in the cache while
    // each search in a table is a cache miss.
    std::vector<std::int64_t> once(own.size()), counts(own.size());
    DistinctIds distinct(own.size(), once.data(), counts.data());
    constexpr std::size_t kAhead = 8;
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (i + 2 * kAhead < own.size()) distinct.prefetch(own[i + 2 * kAhead]);
      if (i + kAhead < own.size()) distinct.prefetch_id(own[i + kAhead]);
      distinct.number(own[i]);
    }
    once.resize(distinct.size());
    rows.distinct[k] = static_cast<std::int64_t>(once.size());
    std::vector<std::uint8_t> there(once.size());
    tables_[k]->lookup_rows(once, there.data(), nullptr, nullptr, nullptr);
    for (std::size_t i = 0; i < once.size(); ++i) {
      if (there[i] == 0) continue;
      rows.ids[k].push_back(once[i]);
      rows.sightings[k] += counts[i];
    }
  });
  return rows;
}

void TableGroup::take(const FoundRows& found, const RowColumns& rows) const {
  if (found.ids.size() != tables_.size())
    refuse("rows must be found by a group of as many tables", tables_.size(), found.ids.size());
  struct Place {
    std::size_t row = 0, value = 0, state = 0;
  };
  std::vector<Place> places;  // of each table's first row
  places.reserve(tables_.size());
  Place end;
  for (std::size_t k = 0; k < tables_.size(); ++k) {
    places.push_back(end);
    const std::size_t count = found.ids[k].size();
    end.row += count;
    end.value += count * tables_[k]->dim();
    end.state += count * tables_[k]->state_dim();
  }
  if (rows.ids.size() != end.row || rows.times.size() != end.row)
    refuse("ids and times must have one entry per row", end.row,
           std::min(rows.ids.size(), rows.times.size()));
  if (rows.values.size() != end.value) refuse("values of all rows", end.value, rows.values.size());
  if (rows.state.size() != end.state) refuse("states of all rows", end.state, rows.state.size());
  each(tables_.size(), [&](std::size_t k) {
    const std::vector<std::int64_t>& own = found.ids[k];
    if (own.empty()) return;
    std::ranges::copy(own, rows.ids.begin() + static_cast<std::ptrdiff_t>(places[k].row));
    tables_[k]->take(own, rows.times.data() + places[k].row, rows.values.data() + places[k].value,
                     rows.state.data() + places[k].state);
  });
}

std::vector<std::size_t> TableGroup::put(std::span<const IncomingRows> rows) const {
  if (rows.size() != tables_.size()) refuse("rows must be given by table", tables_.size(), rows.size());
  for (std::size_t k = 0; k < tables_.size(); ++k) {
    const std::size_t count = rows[k].hashes.size();
    if (rows[k].times.size() != count || rows[k].there.size() != count)
      refuse("times and `there` must have one entry per hash", count,
             std::min(rows[k].times.size(), rows[k].there.size()));
    if (rows[k].values.size() != count * tables_[k]->dim())
      refuse("values of all rows", count * tables_[k]->dim(), rows[k].values.size());
    if (rows[k].state.size() != count * tables_[k]->state_dim())
      refuse("states of all rows", count * tables_[k]->state_dim(), rows[k].state.size());
  }
  std::vector<std::size_t> counts(tables_.size());
  each(tables_.size(), [&](std::size_t k) {
    const IncomingRows& own = rows[k];
    const std::size_t dim = tables_[k]->dim();
    const std::size_t state_dim = tables_[k]->state_dim();
    std::vector<std::int64_t> ids;
    std::vector<std::uint32_t> times;
    ids.reserve(own.hashes.size());
    times.reserve(own.hashes.size());
    for (std::size_t i = 0; i < own.hashes.size(); ++i) {
      if (own.there[i] == 0) continue;
      ids.push_back(unmix(static_cast<std::uint64_t>(own.hashes[i])));
      times.push_back(static_cast<std::uint32_t>(own.times[i]));
    }
    counts[k] = ids.size();
    if (ids.empty()) return;
    if (ids.size() == own.hashes.size()) {
      tables_[k]->restore(ids, times.data(), own.values.data(), own.state.data(), nullptr);
      return;
    }
    std::vector<float> values, state;  // without the gaps
    values.reserve(ids.size() * dim);
    state.reserve(ids.size() * state_dim);
    for (std::size_t i = 0; i < own.hashes.size(); ++i) {
      if (own.there[i] == 0) continue;
      const auto value = own.values.subspan(i * dim, dim), rest = own.state.subspan(i * state_dim, state_dim);
      values.insert(values.end(), value.begin(), value.end());
      state.insert(state.end(), rest.begin(), rest.end());
    }
    tables_[k]->restore(ids, times.data(), values.data(), state.data(), nullptr);
  });
  return counts;
}

}  // namespace monolith
