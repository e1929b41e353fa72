// Scattering: gradients of outputs, summed by distinct id.
//
// A task has a table, or some of its distinct ids where there are too few tables for
// all threads, and goes through the table's cells in order. Ids are numbered as they
// are met, so rows that are new lie one behind the other and are zeroed when their
// turn comes, in the cache.
#include <limits>
#include <utility>
#include <vector>

#include "layouts_body.h"
#include "prefetch.h"

namespace monolith {
namespace {

constexpr std::size_t kCells = 64;     // pooled by maximum in one task
constexpr std::size_t kFewIds = 4096;  // are not worth a task of their own
constexpr std::size_t kAhead = 12;     // gradients are asked for this long before they are added
constexpr std::uint32_t kWindow = 64;  // cells whose rows stay in the cache for all their gradients

// One stretch of a feature's rows, as an output gives its gradient back.
struct Source {
  const float* from;  // of the first cell
  std::int64_t floats, stride;
  int start, width;
};

// Sources have no column in common, so that they may be added one after the other.
bool apart(std::span<const Source> sources) {
  for (std::size_t i = 0; i < sources.size(); ++i)
    for (std::size_t k = 0; k < i; ++k)
      if (sources[i].start < sources[k].start + sources[k].width &&
          sources[k].start < sources[i].start + sources[i].width)
        return false;
  return true;
}

// Whether prefetching pays: neighbours that share lines come by themselves.
bool far_apart(const Source& source) {
  return source.floats * sizeof(float) >= kLine;
}

}  // namespace

class Layouts::Scattering {
 public:
  Scattering(const Layouts& layouts, const LayoutBatch& batch, std::span<const float> rows, float scale,
             std::span<float> out)
      : layouts_(layouts), batch_(batch), rows_(rows), scale_(scale), out_(out) {}

  // What all tasks read.
  void prepare(std::span<const std::span<const float>> gradients) {
    sum_shared(gradients);
    find_peaks();
    sources_.resize(layouts_.features_.size());
    for (std::size_t u = 0; u < layouts_.uses_.size(); ++u) {
      const UseSpec& use = layouts_.uses_[u];
      const LayoutBatch::Cells& cells = batch_.cells_[use.feature];
      if (gradients[use.output].empty() || cells.count == 0) continue;
      if (layouts_.features_[use.feature].pooling == Pooling::kEach)
        sources_[use.feature].push_back({gradients[use.output].data() + use.offset, 0,
                                         layouts_.output_floats_[use.output], use.start, use.width});
      else if (cells.shared)
        sources_[use.feature].push_back({sums_[u].data(), 0, use.width, use.start, use.width});
      else
        sources_[use.feature].push_back({gradients[use.output].data() + use.offset,
                                         layouts_.output_floats_[use.output], use.stride, use.start,
                                         use.width});
    }
  }

  // Some distinct ids of one table.
  struct Part {
    std::size_t table = 0;
    std::uint32_t begin = 0, end = 0;
  };

  // Cuts tables with more than their share into ranges of ids that were met equally often.
  std::vector<Part> parts(std::size_t threads) const {
    std::vector<std::size_t> met(layouts_.table_dims_.size());  // by table
    std::size_t total = 0;
    for (std::size_t f = 0; f < layouts_.features_.size(); ++f) {
      const LayoutBatch::Cells& cells = batch_.cells_[f];
      const std::size_t ids = batch_.splits_[cells.begin + cells.count] - batch_.splits_[cells.begin];
      met[layouts_.features_[f].table] += ids;
      total += ids;
    }
    const std::size_t share = std::max(total / threads, kFewIds);
    std::vector<Part> found;
    for (std::size_t t = 0; t < met.size(); ++t) {
      const auto size = static_cast<std::uint32_t>(batch_.sizes_[t]);
      const std::size_t wanted = (met[t] + share / 2) / share;
      Part part{t, 0, size};
      if (wanted > 1) {
        const std::int64_t* const counts = batch_.counts_.data() + batch_.first_[t];
        std::size_t sum = 0, cuts = 1;
        for (std::uint32_t id = 0; id < size; ++id) {
          if (sum * wanted >= cuts * met[t]) {
            part.end = id;
            found.push_back(std::exchange(part, {t, id, size}));
            while (sum * wanted >= cuts * met[t]) ++cuts;
          }
          sum += counts[id];
        }
      }
      found.push_back(part);
    }
    return found;
  }

  void run(const Part& part) const {
    std::uint32_t fresh = part.begin;
    for (const int f : layouts_.features_of_[part.table]) {
      const LayoutBatch::Cells& cells = batch_.cells_[f];
      if (cells.count == 0) continue;
      if (layouts_.features_[f].pooling == Pooling::kMax)
        add_to_maxima(part, f, fresh);
      else if (cells.one_each && !cells.weighted && layouts_.features_[f].length == 0 &&
               layouts_.features_[f].pooling != Pooling::kEach)
        add_one_each(part, f, fresh);
      else
        add_cells(part, f, fresh);
    }
  }

 private:
  // For a feature that pools by maximum: what the maxima are, and how many ids share each.
  struct Peak {
    std::vector<float> value;
    std::vector<float> sharers;
  };

  // A shared cell takes the gradients of all examples.
  void sum_shared(std::span<const std::span<const float>> gradients) {
    sums_.resize(layouts_.uses_.size());
    for (std::size_t u = 0; u < layouts_.uses_.size(); ++u) {
      const UseSpec& use = layouts_.uses_[u];
      const LayoutBatch::Cells& cells = batch_.cells_[use.feature];
      if (!cells.shared || cells.count == 0 || gradients[use.output].empty()) continue;
      if (layouts_.features_[use.feature].pooling == Pooling::kEach)
        continue;  // it has a gradient of its own
      const int positions = std::max(layouts_.features_[use.feature].length, 1);
      sums_[u].assign(static_cast<std::size_t>(positions) * use.width, 0.0f);
      const std::int64_t floats = layouts_.output_floats_[use.output];
      for (std::size_t example = 0; example < batch_.batch_size_; ++example)
        for (int p = 0; p < positions; ++p)
          add<0>(sums_[u].data() + p * use.width,
                 gradients[use.output].data() + example * floats + use.offset + p * use.stride, use.width);
    }
  }

  void find_peaks() {
    peaks_.resize(layouts_.takes_maximum_ ? layouts_.features_.size() : 0);
    for (std::size_t f = 0; f < peaks_.size(); ++f) {
      if (layouts_.features_[f].pooling != Pooling::kMax) continue;
      const LayoutBatch::Cells& cells = batch_.cells_[f];
      const std::size_t table = layouts_.features_[f].table;
      const std::size_t dim = layouts_.table_dims_[table];
      Peak& peak = peaks_[f];
      peak.value.assign(cells.count * dim, -std::numeric_limits<float>::infinity());
      peak.sharers.assign(cells.count * dim, 0.0f);
      layouts_.spread(cells.count, kCells, [&](std::size_t begin, std::size_t end) {
        for (std::size_t c = begin; c < end; ++c)
          for (std::uint32_t at = batch_.splits_[cells.begin + c]; at < batch_.splits_[cells.begin + c + 1];
               ++at)
            for (std::size_t i = 0; i < dim; ++i) {
              const float value = rows_[batch_.floats_[table] + batch_.rows_[at] * dim + i];
              float& highest = peak.value[c * dim + i];
              float& sharers = peak.sharers[c * dim + i];
              if (value > highest) highest = value, sharers = 0;
              sharers += value == highest ? 1.0f : 0.0f;
            }
      });
    }
  }

  static bool has(const Part& part, std::uint32_t number) {
    return number - part.begin < part.end - part.begin;
  }

  bool is_whole(const Part& part) const { return part.end - part.begin == batch_.sizes_[part.table]; }

  float* row(const Part& part, std::uint32_t number) const {
    return out_.data() + batch_.floats_[part.table] + number * std::size_t(layouts_.table_dims_[part.table]);
  }

  // Zeroes the rows up to `end` that are met for the first time; `fresh` is the first of them.
  void zero(const Part& part, std::uint32_t& fresh, std::uint32_t end) const {
    std::fill(row(part, fresh), row(part, end), 0.0f);
    fresh = end;
  }

  // As most features are: cells and ids are the same, and all count alike.
  void add_one_each(const Part& part, int f, std::uint32_t& fresh) const {
    const LayoutBatch::Cells& cells = batch_.cells_[f];
    const std::uint32_t* const numbers = batch_.rows_.data() + batch_.splits_[cells.begin];
    const bool whole = is_whole(part);
    const std::uint32_t size = apart(sources_[f]) ? kWindow : 1;
    std::uint32_t ours[kWindow];
    for (std::uint32_t begin = 0; begin < cells.count; begin += size) {
      const std::uint32_t end = std::min(begin + size, cells.count);
      std::uint32_t next = fresh, count = 0;
      if (whole) {
        for (std::uint32_t c = begin; c < end; ++c) next += numbers[c] == next ? 1 : 0;
      } else {  // whose a cell is is as good as random: no branch would be foreseen
        for (std::uint32_t c = begin; c < end; ++c) {
          ours[count] = c;
          count += has(part, numbers[c]) ? 1 : 0;
          next += numbers[c] == next && next < part.end ? 1 : 0;
        }
      }
      zero(part, fresh, next);
      for (const Source& source : sources_[f])
        with_width(source.width, [&](auto width) {
          if (whole)
            add_run<decltype(width)::value>(part, source, numbers, begin, end);
          else
            add_some<decltype(width)::value>(part, source, numbers, {ours, count});
        });
    }
  }

  // The gradients of cells that follow one another. They are a whole example apart, which no processor sees
  // coming, so they are asked for.
  template <int kWidth>
  void add_run(const Part& part, const Source& source, const std::uint32_t* numbers, std::uint32_t begin,
               std::uint32_t end) const {
    const std::size_t dim = layouts_.table_dims_[part.table];
    const std::int64_t floats = source.floats;
    const float* from = source.from + begin * floats;
    float* const to = row(part, 0) + source.start;
    if (far_apart(source)) {
      for (std::uint32_t c = begin; c < end; ++c, from += floats) {
        __builtin_prefetch(from + kAhead * floats);
        add_scaled<kWidth>(to + numbers[c] * dim, from, scale_, source.width);
      }
    } else {
      for (std::uint32_t c = begin; c < end; ++c, from += floats)
        add_scaled<kWidth>(to + numbers[c] * dim, from, scale_, source.width);
    }
  }

  template <int kWidth>
  void add_some(const Part& part, const Source& source, const std::uint32_t* numbers,
                std::span<const std::uint32_t> cells) const {
    const std::size_t dim = layouts_.table_dims_[part.table];
    float* const to = row(part, 0) + source.start;
    for (std::size_t i = 0; i < std::min(kAhead, cells.size()); ++i)
      __builtin_prefetch(source.from + cells[i] * source.floats);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      __builtin_prefetch(source.from + cells[std::min(i + kAhead, cells.size() - 1)] * source.floats);
      add_scaled<kWidth>(to + numbers[cells[i]] * dim, source.from + cells[i] * source.floats, scale_,
                         source.width);
    }
  }

  void add_cells(const Part& part, int f, std::uint32_t& fresh) const {
    const LayoutBatch::Cells& cells = batch_.cells_[f];
    const FeatureSpec& feature = layouts_.features_[f];
    const std::uint32_t* const splits = batch_.splits_.data() + cells.begin;
    for (std::uint32_t c = 0; c < cells.count; ++c) {
      for (const Source& source : sources_[f])
        if (far_apart(source)) __builtin_prefetch(source.from + (c + kAhead) * source.floats);
      const bool divided = feature.pooling == Pooling::kMean && !cells.weighted;
      const float shared = divided ? scale_ / static_cast<float>(splits[c + 1] - splits[c]) : scale_;
      for (std::uint32_t at = splits[c]; at < splits[c + 1]; ++at) {
        const std::uint32_t number = batch_.rows_[at];
        if (!has(part, number)) continue;
        if (number == fresh) zero(part, fresh, fresh + 1);
        const std::uint32_t position = feature.pooling == Pooling::kFirstN ? at - splits[c]
                                       : feature.pooling == Pooling::kEach ? at - splits[0]
                                                                           : 0;
        if (feature.length > 0 && position >= static_cast<std::uint32_t>(feature.length)) continue;
        const float factor = cells.weighted ? shared * batch_.factors_[at] : shared;
        for (const Source& source : sources_[f])
          with_width(source.width, [&](auto width) {
            add_scaled<decltype(width)::value>(row(part, number) + source.start,
                                               source.from + c * source.floats + position * source.stride,
                                               factor, source.width);
          });
      }
    }
  }

  // Rows that share a maximum get equal parts of its gradient.
  void add_to_maxima(const Part& part, int f, std::uint32_t& fresh) const {
    const LayoutBatch::Cells& cells = batch_.cells_[f];
    const std::size_t dim = layouts_.table_dims_[part.table];
    const std::uint32_t* const splits = batch_.splits_.data() + cells.begin;
    const Peak& peak = peaks_[f];
    for (std::uint32_t c = 0; c < cells.count; ++c)
      for (std::uint32_t at = splits[c]; at < splits[c + 1]; ++at) {
        const std::uint32_t number = batch_.rows_[at];
        if (!has(part, number)) continue;
        if (number == fresh) zero(part, fresh, fresh + 1);
        float* const to = row(part, number);
        const float* const values = rows_.data() + batch_.floats_[part.table] + number * dim;
        for (const Source& source : sources_[f]) {
          const float* const from = source.from + c * source.floats;
          const std::size_t first = c * dim + source.start;
          for (int i = 0; i < source.width; ++i)
            if (values[source.start + i] == peak.value[first + i])
              to[source.start + i] += from[i] * scale_ / peak.sharers[first + i];
        }
      }
  }

  const Layouts& layouts_;
  const LayoutBatch& batch_;
  const std::span<const float> rows_;
  const float scale_;
  const std::span<float> out_;
  std::vector<std::vector<float>> sums_;      // by use
  std::vector<Peak> peaks_;                   // by feature, where one pools by maximum
  std::vector<std::vector<Source>> sources_;  // by feature: those whose gradients are there
};

void Layouts::scatter(const LayoutBatch& batch, std::span<const float> rows,
                      std::span<const std::span<const float>> gradients, float scale,
                      std::span<float> out) const {
  check(batch, out.size(), gradients.size());
  if (takes_maximum_ ? rows.size() != out.size() : !rows.empty() && rows.size() != out.size())
    refuse("rows must be the rows gathered from: " + std::to_string(out.size()) + " floats, got " +
           std::to_string(rows.size()));
  for (std::size_t o = 0; o < gradients.size(); ++o)
    if (!gradients[o].empty() &&
        gradients[o].size() != parts(batch, o) * static_cast<std::size_t>(output_floats_[o]))
      refuse("the gradient of output " + std::to_string(o) + " must have " + std::to_string(parts(batch, o)) +
             " parts of " + std::to_string(output_floats_[o]) + " floats");
  const MeasuredCall call(workers_.get(), scattering_, batch.rows_.size());
  Scattering scattering(*this, batch, rows, scale, out);
  scattering.prepare(gradients);
  const auto parts = scattering.parts(workers_ != nullptr ? workers_->at_hand() : 1);
  spread(parts.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t p = begin; p < end; ++p) scattering.run(parts[p]);
  });
}

}  // namespace monolith
