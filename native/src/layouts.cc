#include "layouts.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <utility>

#include "distinct_ids.h"
#include "layouts_body.h"

namespace monolith {
namespace {

constexpr std::size_t kSplits = 1 << 16;  // taken over in one task

}  // namespace

Layouts::Layouts(std::vector<int> table_dims, std::vector<FeatureSpec> features, std::vector<UseSpec> uses,
                 std::vector<std::int64_t> output_floats, std::shared_ptr<Workers> workers)
    : table_dims_(std::move(table_dims)),
      features_(std::move(features)),
      uses_(std::move(uses)),
      output_floats_(std::move(output_floats)),
      workers_(std::move(workers)),
      features_of_(table_dims_.size()),
      planning_(workers_ != nullptr ? workers_->threads() : 1),
      numbering_(workers_ != nullptr ? workers_->threads() : 1),
      timing_(workers_ != nullptr ? workers_->threads() : 1),
      gathering_(workers_ != nullptr ? workers_->threads() : 1),
      scattering_(workers_ != nullptr ? workers_->threads() : 1) {
  const auto within = [](std::int64_t number, std::size_t count) {
    return number >= 0 && static_cast<std::size_t>(number) < count;
  };
  for (const int dim : table_dims_)
    if (dim < 1) refuse("a table's rows must have a width of 1 or more");
  for (std::size_t f = 0; f < features_.size(); ++f) {
    const FeatureSpec& feature = features_[f];
    if (!within(feature.table, table_dims_.size())) refuse("a feature names a table that is not there");
    if ((feature.pooling == Pooling::kFirstN) != (feature.length > 0))
      refuse("a length of 1 or more belongs to features that keep their first ids, and to no others");
    features_of_[feature.table].push_back(static_cast<int>(f));
    takes_maximum_ |= feature.pooling == Pooling::kMax;
  }
  each_.assign(output_floats_.size(), -1);
  for (const UseSpec& use : uses_)
    if (within(use.feature, features_.size()) && within(use.output, output_floats_.size()) &&
        features_[use.feature].pooling == Pooling::kEach)
      each_[use.output] = use.feature;
  for (const UseSpec& use : uses_) {
    if (!within(use.feature, features_.size())) refuse("an output uses a feature that is not there");
    if (!within(use.output, output_floats_.size())) refuse("a feature goes to an output that is not there");
    const FeatureSpec& feature = features_[use.feature];
    if (use.start < 0 || use.width < 1 || use.width > table_dims_[feature.table] - use.start)
      refuse("an output uses columns that the feature's rows do not have");
    const std::int64_t reach = std::max(feature.length - 1, 0) * std::max<std::int64_t>(use.stride, 0);
    if (use.offset < 0 || use.stride < 0 || use.offset + reach + use.width > output_floats_[use.output])
      refuse("a feature reaches beyond its output");
    if (use.adds && (feature.pooling == Pooling::kFirstN || feature.pooling == Pooling::kEach))
      refuse("features that keep rows apart cannot be added up");
    if (each_[use.output] >= 0 && each_[use.output] != use.feature)
      refuse("an output that keeps each row of a feature can have no other feature");
  }
  placings_ = order_uses();
}

std::unique_ptr<LayoutBatch> Layouts::plan(std::span<const std::int64_t> ids,
                                           std::span<const std::int64_t> splits,
                                           std::span<const std::uint8_t> shared,
                                           std::span<const std::int64_t> where, std::size_t batch_size,
                                           std::span<const float> weights) const {
  if (!weights.empty() && weights.size() != ids.size())
    refuse("there must be one weight per id, or none: expected " + std::to_string(ids.size()) + ", got " +
           std::to_string(weights.size()));
  if (ids.size() >= UINT32_MAX || splits.size() >= UINT32_MAX) refuse("a batch may have 2^32 - 2 ids");
  if (where.size() != features_.size())
    refuse("where must have one entry per feature: expected " + std::to_string(features_.size()) + ", got " +
           std::to_string(where.size()));
  std::vector<std::size_t>
      begins;  // the first cell of each of the batch's features, then the number of cells
  begins.reserve(shared.size() + 1);
  begins.push_back(0);
  for (const std::uint8_t one : shared) begins.push_back(begins.back() + (one != 0 ? 1 : batch_size));
  if (splits.size() != begins.back() + 1)
    refuse("splits must have one entry per cell and one more: expected " + std::to_string(begins.back() + 1) +
           ", got " + std::to_string(splits.size()));
  if (splits.front() != 0 || splits.back() != static_cast<std::int64_t>(ids.size()))
    refuse("splits must begin with 0 and end with the number of ids, " + std::to_string(ids.size()) +
           ": got " + std::to_string(splits.front()) + " and " + std::to_string(splits.back()));

  const MeasuredCall call(workers_.get(), planning_, ids.size());
  auto batch = std::make_unique<LayoutBatch>();
  batch->batch_size_ = batch_size;
  batch->splits_ = {*memory_, splits.size()};
  std::atomic<bool> falls = false;
  spread(splits.size(), kSplits, [&](std::size_t begin, std::size_t end) {
    std::int64_t before = splits[begin - std::min<std::size_t>(begin, 1)];
    bool fell = false;
    for (std::size_t i = begin; i < end; ++i) {
      fell |= splits[i] < before;
      before = splits[i];
      batch->splits_[i] = static_cast<std::uint32_t>(splits[i]);
    }
    if (fell) falls.store(true, std::memory_order_relaxed);
  });
  if (falls) refuse("splits must not fall");

  std::vector<std::uint8_t> taken(shared.size());
  for (std::size_t f = 0; f < features_.size(); ++f) {
    LayoutBatch::Cells cells;
    if (where[f] >= 0) {
      const auto k = static_cast<std::size_t>(where[f]);
      if (k >= shared.size() || std::exchange(taken[k], 1) != 0)
        refuse("where must name features of the batch, each once");
      cells = {static_cast<std::uint32_t>(begins[k]), static_cast<std::uint32_t>(begins[k + 1] - begins[k]),
               shared[k] != 0};
      const std::uint32_t* const first = batch->splits_.data() + cells.begin;
      cells.one_each = std::adjacent_find(first, first + cells.count + 1, [](auto before, auto after) {
                         return after - before != 1;
                       }) == first + cells.count + 1;
    }
    batch->cells_.push_back(cells);
  }
  if (!weights.empty()) weigh(*batch, weights);

  // Each table works in a part of its own, as large as if no id came twice.
  const std::size_t tables = table_dims_.size();
  const auto range = [&](int f) {
    const LayoutBatch::Cells& cells = batch->cells_[f];
    return std::pair{batch->splits_[cells.begin], batch->splits_[cells.begin + cells.count]};
  };
  std::vector<std::size_t> parts{0};
  for (std::size_t t = 0; t < tables; ++t) {
    parts.push_back(parts.back());
    for (const int f : features_of_[t]) parts.back() += range(f).second - range(f).first;
  }
  const KeptArray<std::int64_t> found(*memory_, parts.back()), counts(*memory_, parts.back());
  batch->rows_ = {*memory_, ids.size()};
  batch->sizes_.resize(tables);
  spread(tables, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      DistinctIds distinct(parts[t + 1] - parts[t], found.data() + parts[t], counts.data() + parts[t]);
      for (const int f : features_of_[t]) {
        const auto [first, last] = range(f);
        for (std::size_t i = first; i < last; ++i) batch->rows_[i] = distinct.number(ids[i]);
      }
      batch->sizes_[t] = static_cast<std::int64_t>(distinct.size());
    }
  });

  batch->first_.push_back(0);
  batch->floats_.push_back(0);
  for (std::size_t t = 0; t < tables; ++t) {
    const auto size = static_cast<std::size_t>(batch->sizes_[t]);
    batch->first_.push_back(batch->first_.back() + size);
    batch->floats_.push_back(batch->floats_.back() + size * table_dims_[t]);
  }
  batch->ids_ = {*memory_, batch->first_.back()};
  batch->counts_ = {*memory_, batch->first_.back()};
  spread(tables, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      std::copy_n(found.data() + parts[t], batch->sizes_[t], batch->ids_.data() + batch->first_[t]);
      std::copy_n(counts.data() + parts[t], batch->sizes_[t], batch->counts_.data() + batch->first_[t]);
    }
  });
  return batch;
}

void Layouts::weigh(LayoutBatch& batch, std::span<const float> weights) const {
  batch.factors_.assign(weights.begin(), weights.end());
  for (std::size_t f = 0; f < features_.size(); ++f) {
    LayoutBatch::Cells& cells = batch.cells_[f];
    if (cells.count == 0) continue;
    const std::uint32_t* const splits = batch.splits_.data() + cells.begin;
    cells.weighted = std::any_of(weights.begin() + splits[0], weights.begin() + splits[cells.count],
                                 [](float weight) { return weight != 1.0f; });
    if (!cells.weighted) continue;
    if (features_[f].pooling == Pooling::kMax) refuse("a feature that takes the maximum has no weights");
    if (features_[f].pooling != Pooling::kMean) continue;
    for (std::uint32_t c = 0; c < cells.count; ++c) {
      float sum = 0;
      for (std::uint32_t at = splits[c]; at < splits[c + 1]; ++at) sum += weights[at];
      for (std::uint32_t at = splits[c]; at < splits[c + 1]; ++at)
        batch.factors_[at] = sum == 0 ? 0.0f : weights[at] / sum;
    }
  }
}

void Layouts::number(const LayoutBatch& batch, std::span<std::int64_t> out) const {
  check(batch, batch.floats(), output_floats_.size());
  struct Stretch {
    std::uint32_t begin, end;  // among the batch's ids
    std::int64_t first;        // distinct id of the table
    std::size_t to;
  };
  std::vector<Stretch> stretches;
  std::size_t read = 0;
  for (std::size_t t = 0; t < table_dims_.size(); ++t)
    for (const int f : features_of_[t]) {
      const LayoutBatch::Cells& cells = batch.cells_[f];
      if (cells.count == 0) continue;
      const std::uint32_t begin = batch.splits_[cells.begin], end = batch.splits_[cells.begin + cells.count];
      stretches.push_back({begin, end, static_cast<std::int64_t>(batch.first_[t]), read});
      read += end - begin;
    }
  if (out.size() != read)
    refuse("there must be a number per id that is read: expected " + std::to_string(read) + ", got " +
           std::to_string(out.size()));
  const MeasuredCall call(workers_.get(), numbering_, out.size());
  spread(stretches.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t s = begin; s < end; ++s) {
      const Stretch& one = stretches[s];
      std::int64_t* to = out.data() + one.to;
      for (std::uint32_t i = one.begin; i < one.end; ++i) *to++ = one.first + batch.rows_[i];
    }
  });
}

void Layouts::newest(const LayoutBatch& batch, std::span<const std::int64_t> times,
                     std::span<std::int64_t> out) const {
  check(batch, batch.floats(), output_floats_.size());
  if (times.size() != batch.batch_size_ || out.size() != batch.ids_.size())
    refuse("there must be a time per example and a place per distinct id: expected " +
           std::to_string(batch.batch_size_) + " and " + std::to_string(batch.ids_.size()) + ", got " +
           std::to_string(times.size()) + " and " + std::to_string(out.size()));
  const std::int64_t of_all = times.empty() ? 0 : *std::max_element(times.begin(), times.end());
  const MeasuredCall call(workers_.get(), timing_, batch.rows_.size());
  spread(table_dims_.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      std::int64_t* const to = out.data() + batch.first_[t];
      std::fill_n(to, batch.sizes_[t], std::numeric_limits<std::int64_t>::min());
      for (const int f : features_of_[t]) {
        const LayoutBatch::Cells& cells = batch.cells_[f];
        for (std::uint32_t c = 0; c < cells.count; ++c) {
          const std::int64_t time = cells.shared ? of_all : times[c];
          for (std::uint32_t at = batch.splits_[cells.begin + c]; at < batch.splits_[cells.begin + c + 1];
               ++at)
            to[batch.rows_[at]] = std::max(to[batch.rows_[at]], time);
        }
      }
    }
  });
}

void Layouts::check(const LayoutBatch& batch, std::size_t rows, std::size_t outputs) const {
  if (batch.cells_.size() != features_.size() || batch.sizes_.size() != table_dims_.size())
    refuse("the batch was planned by other layouts");
  if (rows != batch.floats())
    refuse("rows must have " + std::to_string(batch.floats()) + " floats, got " + std::to_string(rows));
  if (outputs != output_floats_.size())
    refuse("expected " + std::to_string(output_floats_.size()) + " outputs, got " + std::to_string(outputs));
}

Layouts::Moves Layouts::moves(const LayoutBatch& batch, std::span<const int> uses) const {
  check(batch, batch.floats(), output_floats_.size());
  Moves found;
  for (const int u : uses) {
    if (u < 0 || static_cast<std::size_t>(u) >= uses_.size()) refuse("there is no such use");
    const UseSpec& use = uses_[u];
    const FeatureSpec& feature = features_[use.feature];
    const LayoutBatch::Cells& cells = batch.cells_[use.feature];
    const std::size_t rows = batch.floats_[feature.table] + use.start;
    const std::size_t dim = table_dims_[feature.table];
    if (feature.pooling == Pooling::kEach) {
      const std::uint32_t first = batch.splits_[cells.begin];
      for (std::uint32_t at = first; at < first + batch.ids_of(use.feature); ++at) {
        found.from.push_back(static_cast<std::int64_t>(rows + batch.rows_[at] * dim));
        found.to.push_back((at - first) * output_floats_[use.output] + use.offset);
        found.scale.push_back(cells.weighted ? batch.factors_[at] : 1.0f);
      }
      continue;
    }
    for (std::size_t example = 0; example < batch.batch_size_ && cells.count != 0; ++example) {
      const std::uint32_t first = batch.splits_[cells.at(example)];
      std::uint32_t last = batch.splits_[cells.at(example) + 1];
      const float scale = feature.pooling == Pooling::kMean ? 1.0f / static_cast<float>(last - first) : 1.0f;
      if (feature.length > 0) last = std::min(last, first + static_cast<std::uint32_t>(feature.length));
      for (std::uint32_t at = first; at < last; ++at) {
        found.from.push_back(static_cast<std::int64_t>(rows + batch.rows_[at] * dim));
        found.to.push_back(static_cast<std::int64_t>(example) * output_floats_[use.output] + use.offset +
                           (feature.length > 0 ? (at - first) * use.stride : 0));
        found.scale.push_back(cells.weighted ? batch.factors_[at] : scale);
      }
    }
  }
  return found;
}

}  // namespace monolith
