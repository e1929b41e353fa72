// Rounding to bfloat16, float16 and int8: to the nearest, by chance, and the same on every kind of processor.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "narrow.h"
#include "narrow_rows.h"
#include "table.h"

namespace monolith {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = 0x1.fep127f;  // of bfloat16
constexpr float kLargestHalf = 65504.0f;

float nearest(float x) {
  return bfloat16_value(nearest_bfloat16(x));
}

float by_chance(float x, std::uint64_t key, int column) {
  return bfloat16_value(stochastic_bfloat16(x, key, column));
}

float nearest_half(float x) {
  return float_of(nearest_float16(x));
}

float half_by_chance(float x, std::uint64_t key, int column) {
  return float_of(stochastic_float16(x, key, column));
}

void the_nearest_is_found_and_ties_go_to_even() {
  CHECK(nearest(1.0f) == 1.0f);
  CHECK(nearest(0x1.01p0f) == 0x1.0p0f);     // a tie
  CHECK(nearest(0x1.03p0f) == 0x1.04p0f);    // a tie, and the lower one is odd
  CHECK(nearest(0x1.0102p0f) == 0x1.02p0f);  // just above a tie
  CHECK(nearest(-0x1.0102p0f) == -0x1.02p0f);
  CHECK(nearest(0x1p-149f) == 0.0f);  // the smallest subnormal float32
  CHECK(std::signbit(nearest(-0x1p-149f)));
  CHECK(nearest_half(0x1.002p0f) == 1.0f);
  CHECK(nearest_half(0x1.006p0f) == 0x1.008p0f);
  CHECK(nearest_half(0x1.8p-25f) == 0x1p-24f);  // a subnormal half
  CHECK(nearest_half(-0x1p-25f) == 0.0f);       // a tie
}

void nothing_finite_becomes_infinite_and_nothing_else_becomes_finite() {
  for (const float x : {kLargest, std::numeric_limits<float>::max()}) {
    CHECK(nearest(x) == kLargest);
    CHECK(nearest(-x) == -kLargest);
    for (int column = 0; column < 100; ++column) CHECK(by_chance(x, 7, column) == kLargest);
  }
  for (const float x : {kLargestHalf, 65510.0f, 65520.0f, 1e30f}) {
    CHECK(nearest_half(-x) == -kLargestHalf);
    for (int column = 0; column < 100; ++column) CHECK(half_by_chance(x, 7, column) == kLargestHalf);
  }
  CHECK(nearest_half(kInfinity) == kInfinity);
  CHECK(half_by_chance(-kInfinity, 7, 0) == -kInfinity);
  CHECK(nearest(kInfinity) == kInfinity);
  CHECK(by_chance(-kInfinity, 7, 0) == -kInfinity);
  for (const std::uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffc00000u}) {  // NaNs, of whatever low bits
    CHECK(std::isnan(nearest(float_with(bits))));
    CHECK(std::isnan(by_chance(float_with(bits), 7, 0)));
    CHECK(std::isnan(nearest_half(float_with(bits))));
    CHECK(std::isnan(half_by_chance(float_with(bits), 7, 0)));
  }
}

void every_half_is_itself() {
  for (std::uint32_t code = 0; code < 1u << 16; ++code) {
    const float x = float_of(code);
    if (std::isnan(x)) continue;
    CHECK(nearest_float16(x) == code);
    CHECK(stochastic_float16(x, 0x123456789abcdefULL, 3) == code);
  }
}

// The mean of many roundings, in units of the distance of the two neighbours, by IDs, steps or columns.
template <class Draw>
void check_unbiased(Draw draw, float x, float down, float up) {
  constexpr int kTries = 40000;
  double ups = 0;
  for (int i = 0; i < kTries; ++i) {
    const float got = draw(x, i);
    CHECK(got == down || got == up);
    ups += got == up ? 1 : 0;
  }
  const double chance = (x - down) / (static_cast<double>(up) - down);
  const double error = ups / kTries - chance;
  CHECK(std::abs(error) < 5 * std::sqrt(chance * (1 - chance) / kTries) + 1e-9);  // five deviations
}

void rounding_by_chance_is_right_in_the_mean() {
  const std::uint64_t seed = mix(1);
  for (const float x : {0x1.01p0f, 0x1.004p-3f, -0x1.018p5f, 0x1.00fep0f, 0x1.8p-133f}) {
    const float down = bfloat16_value(bits_of(x) >> 16);  // toward zero
    const float up = bfloat16_value((bits_of(x) >> 16) + 1);
    const auto by_ids = [&](float v, int i) { return by_chance(v, rounding_key(mix(i), seed, 5), 3); };
    const auto by_steps = [&](float v, int i) { return by_chance(v, rounding_key(mix(9), seed, i), 3); };
    const auto by_columns = [&](float v, int i) { return by_chance(v, rounding_key(mix(9), seed, 5), i); };
    check_unbiased(by_ids, x, down, up);
    check_unbiased(by_steps, x, down, up);
    check_unbiased(by_columns, x, down, up);
  }
  for (const float x : {0x1.001p0f, -0x1.7ff8p-3f, 0x1.2p-20f, -0x1.8p-26f, 0x1.004p-14f, 65503.0f}) {
    const float near = nearest_half(x);
    const float other = float_of(next_half(half_of(x), near < x));
    check_unbiased([&](float v, int i) { return half_by_chance(v, rounding_key(mix(i), seed, 5), 3); }, x,
                   std::min(near, other), std::max(near, other));
  }
}

// ---- int8 ----------------------------------------------------------------------------------------

std::vector<float> as_int8(const std::vector<float>& values, std::vector<int> widths,
                           const std::uint64_t* key = nullptr) {
  const NarrowRow row{static_cast<int>(values.size()), std::move(widths)};
  const NarrowKernels kernels = narrow_kernels(ValueCoding::kInt8, row.dim);
  std::vector<std::byte> bytes(narrow_bytes(ValueCoding::kInt8, row));
  if (key == nullptr)
    kernels.round_to_nearest(row, values.data(), bytes.data());
  else
    kernels.round_by_chance(row, values.data(), bytes.data(), *key);
  std::vector<float> seen(values.size());
  kernels.widen(row, bytes.data(), seen.data(), 1);
  return seen;
}

void each_segment_has_a_scale_of_its_own() {
  const std::vector<float> values{3.0f, 0.0127f, -0.0016f, 0.0f};
  const std::vector<float> apart = as_int8(values, {1, 3});
  for (int i = 0; i < 4; ++i) CHECK(std::abs(apart[i] - values[i]) <= (i == 0 ? 3e-5f : 0.0127f / 254));
  CHECK(apart[3] == 0);
  const std::vector<float> together = as_int8(values, {4});
  CHECK(together[1] != 0 ? together[1] > 0.02f : true);  // one step of the bias
  CHECK(together[2] == 0);
}

// What is read and written again is the same to the bit, so that a checkpoint of float32 holds the row.
void an_int8_row_is_itself_again() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int turn = 0; turn < 3000; ++turn) {
    std::vector<float> values(20);
    const float size = std::ldexp(1.0f, static_cast<int>(random() % 250) - 125);
    for (float& value : values) value = normal(random) * size;
    if (turn % 3 == 0) std::fill_n(values.begin() + 1, 19, values[1]);  // all of them the largest
    const std::uint64_t key = random();
    for (const std::uint64_t* by : {static_cast<const std::uint64_t*>(nullptr), &key}) {
      const std::vector<float> once = as_int8(values, {1, 19}, by);
      for (const std::uint64_t* again : {static_cast<const std::uint64_t*>(nullptr), &key}) {
        const std::vector<float> twice = as_int8(once, {1, 19}, again);
        for (int i = 0; i < 20; ++i) CHECK(bits_of(twice[i]) == bits_of(once[i]));
      }
    }
  }
}

void an_int8_row_is_right_in_the_mean() {
  constexpr int kTries = 20000;
  std::vector<float> values;
  for (int i = 0; i < 16; ++i) values.push_back(0.013f * static_cast<float>(i - 7));
  values[4] = values[15];  // two that are the largest
  std::vector<double> sums(16);
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t key = rounding_key(mix(i), 0, 5);
    const std::vector<float> seen = as_int8(values, {16}, &key);
    for (int j = 0; j < 16; ++j) sums[j] += seen[j];
  }
  const double apart = values[15] / 127.0;  // two codes
  for (int j = 0; j < 16; ++j)
    CHECK(std::abs(sums[j] / kTries - values[j]) < 5 * 0.5 * apart / std::sqrt(kTries));
  CHECK(std::abs(sums[15] / kTries - values[15]) < 1e-3 * apart);  // the largest by chances of its scale
}

void int8_stays_finite_and_keeps_no_nan_to_itself() {
  const float most = std::numeric_limits<float>::max();
  for (const float value : as_int8({most, -most, 1e38f, 0.0f}, {4})) CHECK(std::isfinite(value));
  CHECK(as_int8({most, 0.0f}, {2})[0] > 0.999999f * most);
  for (const float tiny : {0.0f, -0.0f, 1e-45f, 1e-37f})
    for (const float value : as_int8({tiny, -tiny}, {2})) CHECK(bits_of(value) == 0);
  const std::vector<float> seen = as_int8({kInfinity, 1.0f, std::nanf(""), 1.0f, 1.984375f}, {2, 2, 1});
  for (int i = 0; i < 4; ++i) CHECK(std::isnan(seen[i]));
  CHECK(seen[4] == 1.984375f);
}

// Neighbouring columns and steps must not go up together: the sum of a row would not be right in the mean.
void chances_do_not_go_together() {
  constexpr int kTries = 40000;
  constexpr float kHalf = 0x1.01p0f;
  int columns = 0;
  int steps = 0;
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t key = rounding_key(mix(i), 0, 5);
    const bool up = by_chance(kHalf, key, 0) > 1;
    columns += up == (by_chance(kHalf, key, 1) > 1);
    steps += up == (by_chance(kHalf, rounding_key(mix(i), 0, 6), 0) > 1);
  }
  const double limit = 5 * std::sqrt(0.25 / kTries);
  CHECK(std::abs(static_cast<double>(columns) / kTries - 0.5) < limit);
  CHECK(std::abs(static_cast<double>(steps) / kTries - 0.5) < limit);
}

void every_level_gives_the_same_bits() {
  std::mt19937 random(7);
  for (const ValueCoding coding : {ValueCoding::kBfloat16, ValueCoding::kFloat16, ValueCoding::kInt8})
    for (const int dim : {1, 3, 8, 16, 17, 31, 40, 64, 100, 128}) {
      const NarrowRow row{dim, dim == 17 ? std::vector<int>{1, 16} : std::vector<int>{dim}};
      std::vector<float> values(dim);
      for (float& value : values) {
        value = float_with(static_cast<std::uint32_t>(random()));  // NaNs, too
        if (coding == ValueCoding::kInt8 && !std::isfinite(value)) value = 1.0f;
      }
      const std::size_t bytes = narrow_bytes(coding, row);
      std::vector<std::byte> expected[2];
      for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
        if (level > best_simd_level()) continue;
        const NarrowKernels kernels = narrow_kernels(coding, dim, level);
        for (const bool chance : {false, true}) {
          std::vector<std::byte> codes(bytes);
          std::vector<float> seen(dim);
          if (chance)
            kernels.round_by_chance(row, values.data(), codes.data(), 0x123456789abcdefULL);
          else
            kernels.round_to_nearest(row, values.data(), codes.data());
          if (level == SimdLevel::kBaseline) expected[chance] = codes;
          CHECK(codes == expected[chance]);
          kernels.widen(row, codes.data(), seen.data(), 1);
          const std::uint64_t key = 0x123456789abcdefULL;
          for (int i = 0; i < dim && coding != ValueCoding::kInt8; ++i) {
            const float x = values[i];
            const float wanted =
                coding == ValueCoding::kBfloat16
                    ? bfloat16_value(chance ? stochastic_bfloat16(x, key, i) : nearest_bfloat16(x))
                    : float_of(chance ? stochastic_float16(x, key, i) : nearest_float16(x));
            CHECK(bits_of(seen[i]) == bits_of(wanted));
          }
        }
      }
    }
}

TableSpec table_of(OptimizerKind kind, int dim, ValueStorage storage) {
  TableSpec spec;
  OptimizerSpec optimizer;
  optimizer.kind = kind;
  optimizer.initial_accumulator_value = 0.1f;
  spec.segments = {{dim, optimizer, {}, {}}};
  spec.storage = storage;
  return spec;
}

void a_row_has_fewer_bytes_of_values_and_all_of_state() {
  const auto bytes = [](OptimizerKind kind, int dim, ValueCoding coding) {
    return Table(table_of(kind, dim, {coding, true})).row_bytes();
  };
  for (const ValueCoding coding : {ValueCoding::kBfloat16, ValueCoding::kFloat16}) {
    CHECK(bytes(OptimizerKind::kSgd, 64, coding) == 128);
    CHECK(bytes(OptimizerKind::kAdagrad, 64, coding) == 128 + 256);
    CHECK(bytes(OptimizerKind::kAdagrad, 3, coding) == 24);  // 6, padded to 8, and 12, padded to 16
    CHECK(bytes(OptimizerKind::kGroupAdagrad, 64, coding) == 136);
  }
  CHECK(bytes(OptimizerKind::kSgd, 64, ValueCoding::kInt8) == 72);
  CHECK(bytes(OptimizerKind::kAdagrad, 64, ValueCoding::kInt8) == 68 + 256 + 4);
  CHECK(bytes(OptimizerKind::kGroupAdagrad, 64, ValueCoding::kInt8) == 72);
  CHECK(bytes(OptimizerKind::kSgd, 64, ValueCoding::kFloat32) == 256);
}

// A thousand steps of 1/1000 of a value: to the nearest the value never moves, by chance its mean does. A
// second column stays, so that int8 has a scale to round by.
void small_steps_add_up_by_chance_and_are_lost_to_the_nearest() {
  constexpr std::size_t kRows = 512;
  std::vector<std::int64_t> ids(kRows);
  for (std::size_t i = 0; i < kRows; ++i) ids[i] = static_cast<std::int64_t>(i);
  std::vector<float> first(2 * kRows), gradients(2 * kRows);
  for (std::size_t i = 0; i < kRows; ++i) {
    first[2 * i] = 1.0f;
    first[2 * i + 1] = 1.984375f;  // 127 / 64
    gradients[2 * i] = 1.0f;
  }
  const std::vector<float> rate{2e-4f};
  const auto mean = [&](ValueStorage storage) {
    Table table(table_of(OptimizerKind::kSgd, 2, storage));
    table.assign(ids, first.data(), {});
    for (int step = 0; step < 1000; ++step)
      table.apply_gradients(ids, gradients.data(), nullptr, rate, step, {}, true);
    std::vector<float> seen(2 * kRows);
    table.lookup(ids, seen.data());
    double sum = 0;
    for (std::size_t i = 0; i < kRows; ++i) sum += seen[2 * i];
    return sum / kRows;
  };
  for (const ValueCoding coding : {ValueCoding::kBfloat16, ValueCoding::kFloat16, ValueCoding::kInt8}) {
    CHECK(mean({coding, false}) == 1.0);
    CHECK(std::abs(mean({coding, true}) - 0.8) < 0.02);
  }
  CHECK(std::abs(mean({}) - 0.8) < 1e-4);
}

}  // namespace
}  // namespace monolith

int main() {
  return monolith::check::run({
      {"the nearest is found and ties go to even", monolith::the_nearest_is_found_and_ties_go_to_even},
      {"nothing finite becomes infinite and nothing else becomes finite",
       monolith::nothing_finite_becomes_infinite_and_nothing_else_becomes_finite},
      {"rounding by chance is right in the mean", monolith::rounding_by_chance_is_right_in_the_mean},
      {"every half is itself", monolith::every_half_is_itself},
      {"each segment has a scale of its own", monolith::each_segment_has_a_scale_of_its_own},
      {"an int8 row is itself again", monolith::an_int8_row_is_itself_again},
      {"an int8 row is right in the mean", monolith::an_int8_row_is_right_in_the_mean},
      {"int8 stays finite and keeps no NaN to itself",
       monolith::int8_stays_finite_and_keeps_no_nan_to_itself},
      {"chances do not go together", monolith::chances_do_not_go_together},
      {"every level gives the same bits", monolith::every_level_gives_the_same_bits},
      {"a row has fewer bytes of values and all of state",
       monolith::a_row_has_fewer_bytes_of_values_and_all_of_state},
      {"small steps add up by chance and are lost to the nearest",
       monolith::small_steps_add_up_by_chance_and_are_lost_to_the_nearest},
  });
}
