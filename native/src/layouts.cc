#include "layouts.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "hash.h"

namespace monolith {
namespace {

constexpr std::size_t kExamples = 64;  // worked on together: their outputs stay in the cache
constexpr std::size_t kRows = 512;     // distinct ids per task of a scatter
constexpr std::uint32_t kAhead = 12;   // gradients are fetched this long before they are added

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

// Numbers distinct ids in the order they come. It writes each to `ids`, and how often it came to `counts`.
class Distinct {
 public:
  Distinct(std::size_t at_most, std::int64_t* ids, std::int64_t* counts)
      : bits_(std::bit_width(at_most + at_most / 2)),
        numbers_(std::size_t{1} << bits_, kFree),
        ids_(ids),
        counts_(counts) {}

  std::uint32_t number(std::int64_t id) {
    const std::size_t mask = numbers_.size() - 1;
    for (std::size_t at = mix(id) >> 1 >> (63 - bits_);; at = (at + 1) & mask) {
      const std::uint32_t number = numbers_[at];
      if (number == kFree) {
        ids_[size_] = id;
        counts_[size_] = 1;
        return numbers_[at] = size_++;
      }
      if (ids_[number] == id) {
        ++counts_[number];
        return number;
      }
    }
  }

  std::size_t size() const { return size_; }

 private:
  static constexpr std::uint32_t kFree = UINT32_MAX;
  const int bits_;
  std::vector<std::uint32_t> numbers_;  // by hash, a third of them free at least
  std::int64_t* const ids_;
  std::int64_t* const counts_;
  std::uint32_t size_ = 0;
};

// The usual widths spelled out, so that a stretch is moved in a few instructions; 0 is any.
template <class Work>
void with_width(int width, Work&& work) {
  switch (width) {
    case 1:
      return work(std::integral_constant<int, 1>());
    case 4:
      return work(std::integral_constant<int, 4>());
    case 8:
      return work(std::integral_constant<int, 8>());
    case 16:
      return work(std::integral_constant<int, 16>());
    case 32:
      return work(std::integral_constant<int, 32>());
    case 64:
      return work(std::integral_constant<int, 64>());
    default:
      return work(std::integral_constant<int, 0>());
  }
}

template <int kWidth>
void add(float* to, const float* from, int any_width) {
  const int width = kWidth != 0 ? kWidth : any_width;
  for (int i = 0; i < width; ++i) to[i] += from[i];
}

template <int kWidth>
void add_scaled(float* to, const float* from, float scale, int any_width) {
  const int width = kWidth != 0 ? kWidth : any_width;
  for (int i = 0; i < width; ++i) to[i] += from[i] * scale;
}

}  // namespace

Layouts::Layouts(std::vector<int> table_dims, std::vector<FeatureSpec> features, std::vector<UseSpec> uses,
                 std::vector<std::int64_t> output_floats, std::shared_ptr<Workers> workers)
    : table_dims_(std::move(table_dims)),
      features_(std::move(features)),
      uses_(std::move(uses)),
      output_floats_(std::move(output_floats)),
      workers_(std::move(workers)),
      features_of_(table_dims_.size()),
      uses_of_(features_.size()) {
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
  for (std::size_t u = 0; u < uses_.size(); ++u) {
    const UseSpec& use = uses_[u];
    if (!within(use.feature, features_.size())) refuse("an output uses a feature that is not there");
    if (!within(use.output, output_floats_.size())) refuse("a feature goes to an output that is not there");
    const FeatureSpec& feature = features_[use.feature];
    if (use.start < 0 || use.width < 1 || use.width > table_dims_[feature.table] - use.start)
      refuse("an output uses columns that the feature's rows do not have");
    const std::int64_t reach = std::max(feature.length - 1, 0) * std::max<std::int64_t>(use.stride, 0);
    if (use.offset < 0 || use.stride < 0 || use.offset + reach + use.width > output_floats_[use.output])
      refuse("a feature reaches beyond its output");
    if (use.adds && feature.pooling == Pooling::kFirstN)
      refuse("features that keep their first ids cannot be added up");
    uses_of_[use.feature].push_back(static_cast<int>(u));
  }
}

template <class Each>
void Layouts::spread(std::size_t count, std::size_t grain, Each&& each) const {
  const std::size_t tasks = (count + grain - 1) / grain;
  if (workers_ == nullptr || tasks < 2) {
    if (count > 0) each(std::size_t{0}, count);
    return;
  }
  workers_->run(tasks, [&](std::size_t task) { each(task * grain, std::min(count, (task + 1) * grain)); });
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

  auto batch = std::make_unique<LayoutBatch>();
  batch->batch_size_ = batch_size;
  batch->splits_.resize(splits.size());
  std::int64_t before = 0;
  bool falls = false;
  for (std::size_t i = 0; i < splits.size(); ++i) {
    falls |= splits[i] < before;
    before = splits[i];
    batch->splits_[i] = static_cast<std::uint32_t>(splits[i]);
  }
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
  const auto found = std::make_unique_for_overwrite<std::int64_t[]>(parts.back());
  const auto counts = std::make_unique_for_overwrite<std::int64_t[]>(parts.back());
  batch->rows_.resize(ids.size());
  batch->sizes_.resize(tables);
  spread(tables, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      Distinct distinct(parts[t + 1] - parts[t], found.get() + parts[t], counts.get() + parts[t]);
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
  batch->ids_.reserve(batch->first_.back());
  batch->counts_.reserve(batch->first_.back());
  for (std::size_t t = 0; t < tables; ++t) {
    const std::int64_t* const ids_of = found.get() + parts[t];
    const std::int64_t* const counts_of = counts.get() + parts[t];
    batch->ids_.insert(batch->ids_.end(), ids_of, ids_of + batch->sizes_[t]);
    batch->counts_.insert(batch->counts_.end(), counts_of, counts_of + batch->sizes_[t]);
  }
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

void Layouts::check(const LayoutBatch& batch, std::size_t rows, std::size_t outputs) const {
  if (batch.cells_.size() != features_.size() || batch.sizes_.size() != table_dims_.size())
    refuse("the batch was planned by other layouts");
  if (rows != batch.floats())
    refuse("rows must have " + std::to_string(batch.floats()) + " floats, got " + std::to_string(rows));
  if (outputs != output_floats_.size())
    refuse("expected " + std::to_string(output_floats_.size()) + " outputs, got " + std::to_string(outputs));
}

template <int kWidth>
void Layouts::gather_use(const LayoutBatch& batch, const UseSpec& use, const float* all_rows, float* output,
                         std::size_t begin, std::size_t end) const {
  const int width = kWidth != 0 ? kWidth : use.width;
  const FeatureSpec& feature = features_[use.feature];
  const LayoutBatch::Cells& cells = batch.cells_[use.feature];
  const std::int64_t floats = output_floats_[use.output];
  const std::size_t dim = table_dims_[feature.table];
  const float* const rows = all_rows + batch.floats_[feature.table] + use.start;
  const auto row = [&](std::uint32_t at) { return rows + batch.rows_[at] * dim; };

  if (cells.one_each && !cells.shared && !cells.weighted &&
      feature.length == 0) {  // as most features are, and as good as pooled
    const std::uint32_t first = batch.splits_[cells.begin];
    for (std::size_t example = begin; example < end; ++example) {
      float* const to = output + example * floats + use.offset;
      const float* const from = row(first + static_cast<std::uint32_t>(example));
      if (use.adds)
        add<kWidth>(to, from, width);
      else
        std::memcpy(to, from, width * sizeof(float));
    }
    return;
  }
  std::vector<float> pooled(width);
  for (std::size_t example = begin; example < end; ++example) {
    float* const to = output + example * floats + use.offset;
    std::uint32_t first = 0;
    std::uint32_t last = 0;
    if (cells.count != 0) {
      const std::uint32_t cell = cells.at(example);
      first = batch.splits_[cell];
      last = batch.splits_[cell + 1];
    }
    if (feature.pooling == Pooling::kFirstN) {
      const std::uint32_t kept = std::min(last - first, static_cast<std::uint32_t>(feature.length));
      for (std::uint32_t i = 0; i < kept; ++i) {
        std::memcpy(to + i * use.stride, row(first + i), width * sizeof(float));
        if (cells.weighted)
          for (int k = 0; k < width; ++k) to[i * use.stride + k] *= batch.factors_[first + i];
      }
      for (int i = static_cast<int>(kept); i < feature.length; ++i)
        std::memset(to + i * use.stride, 0, width * sizeof(float));
      continue;
    }
    const float* from;
    if (cells.weighted) {
      from = pooled.data();
      std::memset(pooled.data(), 0, width * sizeof(float));
      for (std::uint32_t at = first; at < last; ++at)
        add_scaled<kWidth>(pooled.data(), row(at), batch.factors_[at], width);
    } else if (last - first == 1) {
      from = row(first);
    } else {
      from = pooled.data();
      if (cells.shared && example > begin) {
        // The same for every example.
      } else if (feature.pooling == Pooling::kMax && last > first) {
        std::memcpy(pooled.data(), row(first), width * sizeof(float));
        for (std::uint32_t at = first + 1; at < last; ++at) {
          const float* const other = row(at);
          for (int i = 0; i < width; ++i) pooled[i] = std::max(pooled[i], other[i]);
        }
      } else {
        std::memset(pooled.data(), 0, width * sizeof(float));
        for (std::uint32_t at = first; at < last; ++at) add<kWidth>(pooled.data(), row(at), width);
        if (feature.pooling == Pooling::kMean && last > first) {
          const auto many = static_cast<float>(last - first);
          for (int i = 0; i < width; ++i) pooled[i] /= many;
        }
      }
    }
    if (use.adds)
      add<kWidth>(to, from, width);
    else
      std::memcpy(to, from, width * sizeof(float));
  }
}

void Layouts::gather(const LayoutBatch& batch, std::span<const float> rows,
                     std::span<const std::span<float>> outputs) const {
  check(batch, rows.size(), outputs.size());
  for (std::size_t o = 0; o < outputs.size(); ++o)
    if (outputs[o].size() != batch.batch_size_ * static_cast<std::size_t>(output_floats_[o]))
      refuse("output " + std::to_string(o) + " must have " + std::to_string(output_floats_[o]) +
             " floats per example");
  spread(batch.batch_size_, kExamples, [&](std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += kExamples)
      for (const UseSpec& use : uses_)
        with_width(use.width, [&](auto width) {
          gather_use<decltype(width)::value>(batch, use, rows.data(), outputs[use.output].data(), at,
                                             std::min(end, at + kExamples));
        });
  });
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

void Layouts::number(const LayoutBatch& batch, std::span<std::int64_t> out) const {
  check(batch, batch.floats(), output_floats_.size());
  if (out.size() != batch.rows_.size())
    refuse("there must be a number per id: expected " + std::to_string(batch.rows_.size()) + ", got " +
           std::to_string(out.size()));
  std::size_t read = 0;
  for (const std::int64_t count : batch.counts_) read += static_cast<std::size_t>(count);
  if (read < out.size()) std::fill(out.begin(), out.end(), 0);
  spread(features_.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t f = begin; f < end; ++f) {
      const LayoutBatch::Cells& cells = batch.cells_[f];
      if (cells.count == 0) continue;
      const auto first = static_cast<std::int64_t>(batch.first_[features_[f].table]);
      const std::uint32_t last = batch.splits_[cells.begin + cells.count];
      for (std::uint32_t i = batch.splits_[cells.begin]; i < last; ++i) out[i] = first + batch.rows_[i];
    }
  });
}

// For a feature that pools by maximum: what the maxima are, and how many ids share each.
struct Layouts::Peak {
  std::vector<float> value;
  std::vector<float> sharers;
};

// Where a distinct id was met.
struct Layouts::Back {
  std::uint32_t at;    // among the batch's ids
  std::uint32_t cell;  // counted from the feature's first
  std::uint32_t feature;
};

void Layouts::scatter(const LayoutBatch& batch, std::span<const float> rows,
                      std::span<const std::span<const float>> gradients, float scale,
                      std::span<float> out) const {
  check(batch, out.size(), gradients.size());
  if (takes_maximum_ ? rows.size() != out.size() : !rows.empty() && rows.size() != out.size())
    refuse("rows must be what was gathered from: " + std::to_string(out.size()) + " floats, got " +
           std::to_string(rows.size()));
  for (std::size_t o = 0; o < gradients.size(); ++o)
    if (!gradients[o].empty() &&
        gradients[o].size() != batch.batch_size_ * static_cast<std::size_t>(output_floats_[o]))
      refuse("the gradient of output " + std::to_string(o) + " must have " +
             std::to_string(output_floats_[o]) + " floats per example");

  // A shared cell takes the gradients of all examples.
  std::vector<std::vector<float>> sums(uses_.size());
  for (std::size_t u = 0; u < uses_.size(); ++u) {
    const UseSpec& use = uses_[u];
    const LayoutBatch::Cells& cells = batch.cells_[use.feature];
    if (!cells.shared || cells.count == 0 || gradients[use.output].empty()) continue;
    const int positions = std::max(features_[use.feature].length, 1);
    sums[u].assign(static_cast<std::size_t>(positions) * use.width, 0.0f);
    for (std::size_t example = 0; example < batch.batch_size_; ++example)
      for (int p = 0; p < positions; ++p)
        add<0>(
            sums[u].data() + p * use.width,
            gradients[use.output].data() + example * output_floats_[use.output] + use.offset + p * use.stride,
            use.width);
  }

  std::vector<Peak> peaks(takes_maximum_ ? features_.size() : 0);
  for (std::size_t f = 0; f < peaks.size(); ++f) {
    if (features_[f].pooling != Pooling::kMax) continue;
    const LayoutBatch::Cells& cells = batch.cells_[f];
    const std::size_t dim = table_dims_[features_[f].table];
    peaks[f].value.assign(cells.count * dim, -std::numeric_limits<float>::infinity());
    peaks[f].sharers.assign(cells.count * dim, 0.0f);
    spread(cells.count, kExamples, [&](std::size_t begin, std::size_t end) {
      for (std::size_t c = begin; c < end; ++c)
        for (std::uint32_t at = batch.splits_[cells.begin + c]; at < batch.splits_[cells.begin + c + 1]; ++at)
          for (std::size_t i = 0; i < dim; ++i) {
            const float value = rows[batch.floats_[features_[f].table] + batch.rows_[at] * dim + i];
            float& peak = peaks[f].value[c * dim + i];
            float& sharers = peaks[f].sharers[c * dim + i];
            if (value > peak) peak = value, sharers = 0;
            sharers += value == peak ? 1.0f : 0.0f;
          }
    });
  }

  // The uses whose gradients are there, by feature, with what does not depend on the id.
  struct Source {
    const float* from;  // of the first cell
    std::int64_t floats, stride;
    int start, width;
  };
  std::vector<std::vector<Source>> sources(features_.size());
  for (std::size_t u = 0; u < uses_.size(); ++u) {
    const UseSpec& use = uses_[u];
    if (gradients[use.output].empty() || batch.cells_[use.feature].count == 0) continue;
    if (batch.cells_[use.feature].shared)
      sources[use.feature].push_back({sums[u].data(), 0, use.width, use.start, use.width});
    else
      sources[use.feature].push_back({gradients[use.output].data() + use.offset, output_floats_[use.output],
                                      use.stride, use.start, use.width});
  }
  // `row` is null unless something pools by maximum.
  const auto add_back = [&](const Back& back, float* to, const float* row) {
    const FeatureSpec& feature = features_[back.feature];
    std::int64_t position = 0;
    float factor = scale;
    if (feature.pooling != Pooling::kSum) {
      const std::uint32_t* const cell = batch.splits_.data() + batch.cells_[back.feature].begin + back.cell;
      if (feature.pooling == Pooling::kMean && !batch.cells_[back.feature].weighted)
        factor /= static_cast<float>(cell[1] - cell[0]);
      if (feature.pooling == Pooling::kFirstN) {
        position = back.at - cell[0];
        if (position >= feature.length) return;
      }
    }
    if (batch.cells_[back.feature].weighted) factor *= batch.factors_[back.at];
    for (const Source& source : sources[back.feature]) {
      const float* const from = source.from + back.cell * source.floats + position * source.stride;
      if (feature.pooling == Pooling::kMax) {
        const Peak& peak = peaks[back.feature];
        const std::size_t at =
            back.cell * static_cast<std::size_t>(table_dims_[feature.table]) + source.start;
        for (int i = 0; i < source.width; ++i)
          if (row[source.start + i] == peak.value[at + i])
            to[source.start + i] += from[i] * factor / peak.sharers[at + i];
        continue;
      }
      with_width(source.width, [&](auto width) {
        add_scaled<decltype(width)::value>(to + source.start, from, factor, source.width);
      });
    }
  };
  // Cells that follow one another are a whole example apart, which no processor sees coming.
  const auto prefetch = [&](const Back& back) {
    for (const Source& source : sources[back.feature])
      __builtin_prefetch(source.from + back.cell * source.floats);
  };
  const std::size_t threads = workers_ != nullptr ? workers_->threads() : 1;
  if (table_dims_.size() >= 2 * threads || threads == 1) {
    // Tables enough for all threads: each goes through its own cells.
    spread(table_dims_.size(), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t t = begin; t < end; ++t) {
        const std::size_t dim = table_dims_[t];
        std::fill(out.begin() + batch.floats_[t], out.begin() + batch.floats_[t + 1], 0.0f);
        for (const int f : features_of_[t]) {
          const LayoutBatch::Cells& cells = batch.cells_[f];
          const auto feature = static_cast<std::uint32_t>(f);
          for (std::uint32_t c = 0; c < cells.count; ++c) {
            if (c + kAhead < cells.count) prefetch({0, c + kAhead, feature});
            const std::uint32_t* const cell = batch.splits_.data() + cells.begin + c;
            for (std::uint32_t at = cell[0]; at < cell[1]; ++at) {
              const std::size_t place = batch.floats_[t] + batch.rows_[at] * dim;
              add_back({at, c, feature}, out.data() + place, takes_maximum_ ? rows.data() + place : nullptr);
            }
          }
        }
      }
    });
    return;
  }

  // Few tables: threads share the distinct ids. Where each was met, in the order of features and cells, so
  // that sums are the same as above.
  std::vector<std::uint32_t> starts(batch.ids_.size() + 1);
  for (std::size_t i = 0; i < batch.ids_.size(); ++i)
    starts[i + 1] = starts[i] + static_cast<std::uint32_t>(batch.counts_[i]);
  std::vector<Back> backs(starts.back());
  spread(table_dims_.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      std::vector<std::uint32_t> next(starts.begin() + batch.first_[t], starts.begin() + batch.first_[t + 1]);
      for (const int f : features_of_[t]) {
        const LayoutBatch::Cells& cells = batch.cells_[f];
        for (std::uint32_t c = 0; c < cells.count; ++c)
          for (std::uint32_t at = batch.splits_[cells.begin + c]; at < batch.splits_[cells.begin + c + 1];
               ++at)
            backs[next[batch.rows_[at]]++] = {at, c, static_cast<std::uint32_t>(f)};
      }
    }
  });

  spread(batch.ids_.size(), kRows, [&](std::size_t begin, std::size_t end) {
    auto table = static_cast<std::size_t>(std::upper_bound(batch.first_.begin(), batch.first_.end(), begin) -
                                          batch.first_.begin() - 1);
    for (std::size_t i = begin; i < end; ++i) {
      while (i >= batch.first_[table + 1]) ++table;
      const std::size_t dim = table_dims_[table];
      const std::size_t place = batch.floats_[table] + (i - batch.first_[table]) * dim;
      float* const to = out.data() + place;
      std::fill_n(to, dim, 0.0f);
      for (std::uint32_t b = starts[i]; b < starts[i + 1]; ++b) {
        if (b + kAhead < backs.size()) prefetch(backs[b + kAhead]);
        add_back(backs[b], to, takes_maximum_ ? rows.data() + place : nullptr);
      }
    }
  });
}

}  // namespace monolith
