// Entry: what one row of a table is made of.
//
// A training row is the values of all segments side by side, then the optimizer
// state of each segment. A serving row is the values only, compressed segment by
// segment. An Entry knows this layout and the kernels that work on it; it holds
// no row itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "optimizers.h"

namespace monolith {

struct InitializerSpec {
  // Uniform in [low, high); low == high is a constant.
  float low = 0;
  float high = 0;
};

enum class CompressorKind : std::uint8_t { kFp32, kFp16, kFixedR8, kOneBit };

struct CompressorSpec {
  CompressorKind kind = CompressorKind::kFp32;
  float range = 1;               // fixed_r8: values reach from -range to range
  std::int64_t step_size = 200;  // one_bit: the scale is renewed at multiples of this step
  float init_scale = 1;
  float max_scale = 10000;
  float amplitude = 0.1f;
};

struct SegmentSpec {
  int dim = 1;
  OptimizerSpec optimizer;
  InitializerSpec initializer;
  CompressorSpec compressor;
};

class Entry {
 public:
  // Throws std::invalid_argument for segments that make no row.
  Entry(std::vector<SegmentSpec> segments, bool serving, std::uint64_t seed);

  int dim() const { return dim_; }
  int state_dim() const { return state_dim_; }
  int segments() const { return static_cast<int>(parts_.size()); }
  std::size_t row_bytes() const { return row_bytes_; }  // as stored, padded to 16
  bool serving() const { return serving_; }
  bool delay_compensated() const { return delay_compensated_; }
  bool counts_steps() const { return counts_steps_; }
  // Whether a training lookup shows something other than the stored values.
  bool has_view() const { return has_view_; }
  // Whether rows decay by steps that they are not in, so that a lookup needs their state.
  bool decays_lazily() const { return decays_lazily_; }
  // Floats of scratch that `step` needs.
  std::size_t scratch_floats() const { return static_cast<std::size_t>(dim_); }

  // A new row: initial values and state. The values depend on (seed, id, column) alone, so a row is
  // born the same on every shard and thread.
  void initialize(std::byte* row, std::int64_t id) const;
  // New state for a row whose values are given.
  void initialize_state(std::byte* row) const;
  // The same for one segment after another of a row given as columns.
  void initialize_state(float* state) const;

  void read(const std::byte* row, float* values) const;   // as stored, decompressed
  void write(std::byte* row, const float* values) const;  // compressed
  void view(float* values) const;                         // what training sees, in place
  // As stored, and decayed by all steps since the row's last; for rows that decay lazily.
  void read_decayed(const std::byte* row, float* values) const;
  // The same in the row itself, which then has been in the newest step, if in any: before it is written.
  void catch_up(std::byte* row) const;
  // Notes the state of a restored row: the newest step of all rows is that of the table.
  void note_steps(const float* state);
  // There are no rows any more: those that follow say which step is the newest.
  void forget_steps() { steps_.store(0, std::memory_order_relaxed); }

  // One optimizer step of every segment. `rates` holds one rate per segment; `latest` is null unless
  // delay_compensated().
  void step(std::byte* row, std::int64_t id, const float* gradient, const float* latest, const float* rates,
            std::int64_t step, float* scratch) const;

  // The kernel that is the whole of `step` at these rates, or null when there is more to it than one. Its
  // steps by usable gradients stay finite: a decay that takes more than the weight itself is not among them.
  StepsKernel plain_kernel(std::span<const float> rates) const {
    const bool alike = std::equal(rates.begin() + 1, rates.end(), rates.begin());
    return alike && !(std::abs(rates[0] * plain_spec().weight_decay) > 1) ? plain_ : nullptr;
  }
  const OptimizerSpec& plain_spec() const { return parts_[0].spec.optimizer; }

  // Called once before the rows of a step: renews the scales of one-bit segments that are due, and what rows
  // decay by.
  void begin_step(std::int64_t step, const float* rates);
  std::vector<float> scales() const;
  void set_scales(const std::vector<float>& scales);

 private:
  struct Part {
    SegmentSpec spec;
    StepKernel kernel;
    int column;        // of its first value
    int state;         // of its first state float, counted from the row's state
    std::size_t byte;  // of its first byte in a serving row
  };

  float random(std::uint64_t salt, int column) const;
  void be_at(std::int64_t steps);

  std::vector<Part> parts_;
  std::unique_ptr<std::atomic<float>[]> scales_;  // one per segment; only one-bit segments use theirs
  std::unique_ptr<std::atomic<float>[]> decays_;  // one per segment: the share that a step takes of a value
  std::atomic<std::int64_t> steps_{0};            // one more than the newest step, for lazy decay
  const std::uint64_t seed_;
  const bool serving_;
  int dim_ = 0;
  int state_dim_ = 0;
  std::size_t row_bytes_ = 0;
  bool delay_compensated_ = false;
  bool counts_steps_ = false;
  bool has_view_ = false;
  bool decays_lazily_ = false;
  StepsKernel plain_ = nullptr;  // steps all segments as one, where they are trained alike
};

}  // namespace monolith
