// Gathering: rows of cells, pooled and put where outputs want them.
#include <algorithm>
#include <cstring>
#include <string>

#include "layouts_body.h"
#include "prefetch.h"

namespace monolith {
namespace {

constexpr std::size_t kExamples = 64;  // worked on together: their outputs stay in the cache
constexpr std::size_t kAhead = 12;     // rows are asked for this long before they are read

}  // namespace

// The uses in an order in which those of one feature stand together where they can: a row then comes from
// memory once. Those of one output stay as they are, since some of them add to what others put there.
std::vector<Layouts::Placing> Layouts::order_uses() const {
  std::vector<std::vector<UseSpec>> waiting(output_floats_.size());
  for (auto use = uses_.rbegin(); use != uses_.rend(); ++use) waiting[use->output].push_back(*use);
  std::vector<Placing> ordered;
  for (auto& output : waiting)
    while (!output.empty()) {
      const std::size_t group = ordered.size();
      const int feature = output.back().feature;
      int begin = output.back().start, end = begin;
      for (auto& other : waiting)
        for (; !other.empty() && other.back().feature == feature; other.pop_back()) {
          ordered.push_back({other.back(), 0, 0});
          begin = std::min(begin, other.back().start);
          end = std::max(end, other.back().start + other.back().width);
        }
      ordered[group].begin = begin;
      ordered[group].end = end;
    }
  return ordered;
}

template <int kWidth>
void Layouts::gather_use(const LayoutBatch& batch, const Placing& placing, const float* all_rows,
                         float* output, std::size_t begin, std::size_t end) const {
  const UseSpec& use = placing.use;
  const int width = kWidth != 0 ? kWidth : use.width;
  const FeatureSpec& feature = features_[use.feature];
  const LayoutBatch::Cells& cells = batch.cells_[use.feature];
  const std::int64_t floats = output_floats_[use.output];
  const std::size_t dim = table_dims_[feature.table];
  const float* const rows = all_rows + batch.floats_[feature.table] + use.start;
  const auto row = [&](std::uint32_t at) { return rows + batch.rows_[at] * dim; };
  const std::uint32_t ids_end = batch.splits_[cells.begin + cells.count];
  const bool asks = placing.end > placing.begin;
  const auto ask = [&](std::size_t at) {
    const float* const later = row(std::min(static_cast<std::uint32_t>(at + kAhead), ids_end - 1));
    prefetch<0>(later + placing.begin - use.start, (placing.end - placing.begin) * sizeof(float));
  };

  if (feature.pooling == Pooling::kEach) {
    if (cells.count == 0 || (cells.shared && begin > 0)) return;  // a shared cell goes with the first example
    const std::uint32_t base = batch.splits_[cells.begin];
    const std::uint32_t last = batch.splits_[cells.shared ? cells.begin + 1 : cells.at(end)];
    for (std::uint32_t at = batch.splits_[cells.at(begin)]; at < last; ++at) {
      if (asks) ask(at);
      float* const to = output + (at - base) * floats + use.offset;
      const float factor = cells.weighted ? batch.factors_[at] : 1.0f;
      const float* const from = row(at);
      for (int k = 0; k < width; ++k) to[k] = from[k] * factor;
    }
    return;
  }
  if (cells.one_each && !cells.shared && !cells.weighted &&
      feature.length == 0) {  // as most features are, and as good as pooled
    // All in variables of its own: for all a compiler knows, a copied row may change what others hold.
    const std::uint32_t* const numbers = batch.rows_.data() + batch.splits_[cells.begin];
    const std::size_t last = cells.count - 1;
    const auto each = [rows, numbers, dim, begin, end](float* to, std::size_t floats, auto&& ask,
                                                       auto&& put) {
      for (std::size_t example = begin; example < end; ++example, to += floats) {
        ask(example);
        put(to, rows + numbers[example] * dim);
      }
    };
    const auto ahead = [=, columns = rows + placing.begin - use.start,
                        reach = placing.end - placing.begin - 1](std::size_t example) {
      const float* const later = columns + numbers[std::min(example + kAhead, last)] * dim;
      for (int i = 0; i < reach; i += kLine / sizeof(float)) __builtin_prefetch(later + i);
      __builtin_prefetch(later + reach);
    };
    const auto nothing = [](std::size_t) {};
    const auto added = [width](float* to, const float* from) { add<kWidth>(to, from, width); };
    const auto copied = [width](float* to, const float* from) {
      std::memcpy(to, from, width * sizeof(float));
    };
    float* const to = output + begin * floats + use.offset;
    if (use.adds)
      asks ? each(to, floats, ahead, added) : each(to, floats, nothing, added);
    else
      asks ? each(to, floats, ahead, copied) : each(to, floats, nothing, copied);
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
      if (asks && !cells.shared)
        for (std::uint32_t at = first; at < last; ++at) ask(at);
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
    if (outputs[o].size() != parts(batch, o) * static_cast<std::size_t>(output_floats_[o]))
      refuse("output " + std::to_string(o) + " must have " + std::to_string(parts(batch, o)) + " parts of " +
             std::to_string(output_floats_[o]) + " floats");
  const MeasuredCall call(workers_.get(), gathering_, batch.rows_.size());
  spread(batch.batch_size_, kExamples, [&](std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += kExamples)
      for (const Placing& placing : placings_)
        with_width(placing.use.width, [&](auto width) {
          gather_use<decltype(width)::value>(batch, placing, rows.data(), outputs[placing.use.output].data(),
                                             at, std::min(end, at + kExamples));
        });
  });
}

}  // namespace monolith
