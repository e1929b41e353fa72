// Layouts: from looked-up rows to the tensors a model reads, and gradients back.
//
// A batch holds its ids cell by cell: feature after feature, and within a feature one
// cell per example. A shared feature has one cell that stands for every example.
// Planning a batch finds the distinct ids of each table; gathering pools the rows of
// every cell and puts stretches of them where each output wants them; scattering
// brings the outputs' gradients back, summed by distinct id.
//
// An output of a feature that keeps each row (kEach) has a part for each of the feature's ids, in their
// order; all others have a part for each example.
//
// The outcome does not depend on how many threads there are: a gradient is summed
// by one thread, in the order in which the id was met.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kept_memory.h"
#include "team_choice.h"
#include "workers.h"

namespace monolith {

enum class Pooling : std::uint8_t { kSum, kMean, kMax, kFirstN, kEach };

struct FeatureSpec {
  int table = 0;
  Pooling pooling = Pooling::kSum;
  int length = 0;  // kFirstN: positions of an example; 0 otherwise
};

// One stretch of a feature's rows in one output.
struct UseSpec {
  int feature = 0;
  int start = 0;  // first column of the row
  int width = 0;
  int output = 0;
  std::int64_t offset = 0;  // floats from the beginning of an example's part of the output
  std::int64_t stride = 0;  // kFirstN: floats from one position to the next
  bool adds = false;        // adds to what earlier uses put there
};

// One batch, planned. Never changes.
class LayoutBatch {
 public:
  std::span<const std::int64_t> ids() const { return {ids_.data(), ids_.size()}; }  // distinct, by table
  std::span<const std::int64_t> sizes() const { return sizes_; }  // how many of them each table has
  std::span<const std::int64_t> counts() const {                  // how often each was met
    return {counts_.data(), counts_.size()};
  }
  std::size_t batch_size() const { return batch_size_; }
  std::size_t floats() const { return floats_.back(); }  // of the distinct ids' rows, one after another
  // How many ids a feature of the layouts has in the batch.
  std::size_t ids_of(std::size_t feature) const {
    const Cells& cells = cells_[feature];
    return splits_[cells.begin + cells.count] - splits_[cells.begin];
  }
  // Whether every cell that is read has exactly one id.
  bool one_each() const {
    for (const Cells& cells : cells_)
      if (cells.count != 0 && !cells.one_each) return false;
    return true;
  }

 private:
  friend class Layouts;

  // Where a feature's cells are; none when the batch does not have the feature.
  struct Cells {
    std::uint32_t begin = 0;
    std::uint32_t count = 0;
    bool shared = true;
    bool one_each = false;  // every cell has exactly one id
    bool weighted = false;  // its ids count as `factors_` says
    // Of an example; the cell after it begins where this one ends.
    std::uint32_t at(std::size_t example) const {
      return begin + (shared ? 0 : static_cast<std::uint32_t>(example));
    }
  };

  std::size_t batch_size_ = 0;
  std::vector<std::int64_t> sizes_;
  KeptArray<std::int64_t> ids_, counts_;
  KeptArray<std::uint32_t> splits_;  // where each cell begins among the batch's ids, then their number
  KeptArray<std::uint32_t> rows_;    // of each of the batch's ids: its number among its table's distinct ones
  std::vector<float> factors_;       // of each of the batch's ids, where features are weighted; see plan
  std::vector<Cells> cells_;         // by feature of the layouts
  std::vector<std::size_t> first_;   // by table: its first distinct id, then their number
  std::vector<std::size_t> floats_;  // by table: where its rows begin, then the number of floats
  std::vector<int> tables_, dims_;   // by feature
};

// Safe from any thread. What does not fit throws std::invalid_argument before anything is written.
class Layouts {
 public:
  // `table_dims` are the widths of rows; `output_floats` what a part takes in each output. The uses of an
  // output fill it: what none of them covers is left as it is. If one keeps each row, all are of its feature.
  Layouts(std::vector<int> table_dims, std::vector<FeatureSpec> features, std::vector<UseSpec> uses,
          std::vector<std::int64_t> output_floats, std::shared_ptr<Workers> workers = nullptr);

  std::size_t outputs() const { return output_floats_.size(); }
  std::size_t features() const { return features_.size(); }
  std::int64_t output_floats(std::size_t output) const { return output_floats_[output]; }

  // `splits` says where each cell of the batch begins in `ids`, with the end behind the last; `shared`
  // which of the batch's features have one cell for all; `where` the place of each feature of the layouts
  // among those of the batch, or -1 for one that the batch does not have, whose cells are then empty.
  // `weights` has one per id, or none: by it a row is multiplied before it is added up or kept, and a mean is
  // divided by the sum of the weights, or 0 where that is 0. Maxima take no weights other than 1.
  std::unique_ptr<LayoutBatch> plan(std::span<const std::int64_t> ids, std::span<const std::int64_t> splits,
                                    std::span<const std::uint8_t> shared, std::span<const std::int64_t> where,
                                    std::size_t batch_size, std::span<const float> weights = {}) const;

  // How many parts an output has in a batch: one per example, or per id of the feature whose rows it keeps.
  std::size_t parts(const LayoutBatch& batch, std::size_t output) const {
    const int feature = each_[output];
    if (feature < 0 || batch.batch_size() == 0) return batch.batch_size();
    return batch.ids_of(static_cast<std::size_t>(feature));
  }

  // `rows` has one row per distinct id; each output has its parts.
  void gather(const LayoutBatch& batch, std::span<const float> rows,
              std::span<const std::span<float>> outputs) const;

  // Fills `out`, laid out as `rows`, from the gradients of the outputs, times `scale`; an empty one counts
  // as zeros. `rows` are the rows gathered from, and may be empty when nothing pools by maximum.
  void scatter(const LayoutBatch& batch, std::span<const float> rows,
               std::span<const std::span<const float>> gradients, float scale, std::span<float> out) const;

  // The moves that gathering by `uses` makes, for another device to make: for every id of theirs and, where a
  // feature is shared, for every example, the first float among the rows and in the output, and what to
  // multiply with before adding up.
  struct Moves {
    std::vector<std::int64_t> from, to;
    std::vector<float> scale;
  };
  Moves moves(const LayoutBatch& batch, std::span<const int> uses) const;

  // For each id that is read, table after table and within a table feature after feature: its number among
  // `LayoutBatch::ids`.
  void number(const LayoutBatch& batch, std::span<std::int64_t> out) const;

  // For each of `LayoutBatch::ids` the newest of `times`, one per example, among the examples that contain
  // it.
  void newest(const LayoutBatch& batch, std::span<const std::int64_t> times,
              std::span<std::int64_t> out) const;

 private:
  class Scattering;
  void weigh(LayoutBatch& batch, std::span<const float> weights) const;
  void check(const LayoutBatch& batch, std::size_t rows, std::size_t outputs) const;
  // A use in the order of gathering; the first of a feature asks for columns [begin, end) of its rows.
  struct Placing {
    UseSpec use;
    int begin = 0, end = 0;
  };
  std::vector<Placing> order_uses() const;
  template <int kWidth>
  void gather_use(const LayoutBatch& batch, const Placing& placing, const float* rows, float* output,
                  std::size_t begin, std::size_t end) const;
  template <class Each>
  void spread(std::size_t count, std::size_t grain, Each&& each) const;

  const std::vector<int> table_dims_;
  const std::vector<FeatureSpec> features_;
  const std::vector<UseSpec> uses_;
  const std::vector<std::int64_t> output_floats_;
  const std::shared_ptr<Workers> workers_;
  std::vector<std::vector<int>> features_of_;  // by table
  std::vector<Placing> placings_;              // what gathering does, in order
  std::vector<int> each_;                      // by output: the feature whose rows it keeps, or -1
  bool takes_maximum_ = false;
  const std::shared_ptr<KeptMemory> memory_ = std::make_shared<KeptMemory>();
  mutable TeamChoice planning_, numbering_, timing_, gathering_, scattering_;
};

}  // namespace monolith
