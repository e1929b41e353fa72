// Entry: what one row of a table is made of.
//
// A training row is the values of all segments side by side, then the optimizer
// state of each segment. A serving row is the values only, compressed segment by
// segment. An Entry knows this layout and the kernels that work on it; it holds
// no row itself.
//
//   float32               | dim x 4 bytes                           | state x 4 bytes | padded to 16
//   bfloat16 and float16  | dim x 2 bytes | to 4                    | state x 4 bytes | padded to 8
//   int8                  | dim bytes     | to 4, a scale a segment | state x 4 bytes | padded to 8
//
// Narrow values are float32 to every caller: widened when they are read, and rounded once when they are
// written, after a step of float32 arithmetic.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "narrow_rows.h"
#include "optimizers.h"

namespace monolith {

// How the values of a training row are stored, and how those that a step has changed are rounded. Values that
// are assigned, restored or new are rounded to the nearest.
struct ValueStorage {
  ValueCoding coding = ValueCoding::kFloat32;
  bool by_chance = false;
};

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
  Entry(std::vector<SegmentSpec> segments, bool serving, std::uint64_t seed, ValueStorage storage = {});

  int dim() const { return dim_; }
  int state_dim() const { return state_dim_; }
  int segments() const { return static_cast<int>(parts_.size()); }
  std::size_t row_bytes() const { return row_bytes_; }      // as stored and padded
  std::size_t value_bytes() const { return value_bytes_; }  // of a training row, that it begins with
  bool serving() const { return serving_; }
  // Whether a row has its values as floats, and no work is needed to read or write them.
  bool stores_floats() const { return storage_.coding == ValueCoding::kFloat32 && !serving_; }
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

  float* state(std::byte* row) const { return reinterpret_cast<float*>(row + state_byte_); }
  const float* state(const std::byte* row) const { return reinterpret_cast<const float*>(row + state_byte_); }
  void read(const std::byte* row, float* values) const;   // as stored, decompressed
  void write(std::byte* row, const float* values) const;  // compressed
  // Reads the values of `count` training rows that are side by side, value_bytes() each.
  void read_values(const std::byte* rows, std::size_t count, float* values) const;
  // Writes values that a step has changed; `hash` is that of the row's ID.
  void write_stepped(std::byte* row, std::uint64_t hash, const float* values, std::int64_t step) const;
  void view(float* values) const;  // what training sees, in place
  // As stored, and decayed by all steps since the row's last; for rows that decay lazily.
  void read_decayed(const std::byte* row, float* values) const;
  // The same in the row itself, which then has been in the newest step, if in any: before it is written.
  void catch_up(std::byte* row) const;
  // Notes the state of a restored row: the newest step of all rows is that of the table.
  void note_steps(const float* state);
  // There are no rows any more: those that follow say which step is the newest.
  void forget_steps() { steps_.store(0, std::memory_order_relaxed); }

  // One optimizer step of every segment, on the values and the state of a row. `rates` holds one rate per
  // segment; `latest` is null unless delay_compensated().
  void step(float* values, float* state, std::int64_t id, const float* gradient, const float* latest,
            const float* rates, std::int64_t step, float* scratch) const;

  // The kernels that are the whole of `step` at these rates, or null when there is more to it than one. Their
  // steps by usable gradients stay finite: a decay that takes more than the weight itself is not among them.
  StepKernels plain_kernels(std::span<const float> rates) const {
    const bool alike = std::equal(rates.begin() + 1, rates.end(), rates.begin());
    return alike && !(std::abs(rates[0] * plain_spec().weight_decay) > 1) ? plain_ : StepKernels{};
  }
  // `step` of `count` rows of narrow values by the plain kernel. `hashes` are those of their IDs, `scratch`
  // has room for dim() floats.
  void step_rounded(std::byte* const* rows, const std::uint64_t* hashes, const float* const* gradients,
                    std::size_t count, float rate, std::int64_t step, float* scratch) const;
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
  // What is left of a value of segment `p` after the steps since the last of the row with this state.
  float kept(std::size_t p, const float* state) const;
  void be_at(std::int64_t steps);

  std::vector<Part> parts_;
  std::unique_ptr<std::atomic<float>[]> scales_;  // one per segment; only one-bit segments use theirs
  std::unique_ptr<std::atomic<float>[]> decays_;  // one per segment: the share that a step takes of a value
  std::atomic<std::int64_t> steps_{0};            // one more than the newest step, for lazy decay
  const std::uint64_t seed_;
  const bool serving_;
  const ValueStorage storage_;
  NarrowRow narrow_;
  NarrowKernels kernels_;  // of narrow rows
  int dim_ = 0;
  int state_dim_ = 0;
  std::size_t row_bytes_ = 0;
  std::size_t value_bytes_ = 0;
  std::size_t state_byte_ = 0;
  bool delay_compensated_ = false;
  bool counts_steps_ = false;
  bool has_view_ = false;
  bool decays_lazily_ = false;
  StepKernels plain_;  // step all segments as one, where they are trained alike
};

}  // namespace monolith
