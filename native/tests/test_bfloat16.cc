// Rounding to bfloat16: to the nearest, by chance, and the same on every kind of processor.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "bfloat16.h"
#include "bfloat16_rows.h"
#include "check.h"
#include "table.h"

namespace monolith {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = 0x1.fep127f;  // of bfloat16

float nearest(float x) {
  return bfloat16_value(nearest_bfloat16(x));
}

float by_chance(float x, std::uint64_t key, int column) {
  return bfloat16_value(stochastic_bfloat16(x, key, column));
}

void the_nearest_is_found_and_ties_go_to_even() {
  CHECK(nearest(1.0f) == 1.0f);
  CHECK(nearest(0x1.01p0f) == 0x1.0p0f);     // a tie
  CHECK(nearest(0x1.03p0f) == 0x1.04p0f);    // a tie, and the lower one is odd
  CHECK(nearest(0x1.0102p0f) == 0x1.02p0f);  // just above a tie
  CHECK(nearest(-0x1.0102p0f) == -0x1.02p0f);
  CHECK(nearest(0x1p-149f) == 0.0f);  // the smallest subnormal float32
  CHECK(std::signbit(nearest(-0x1p-149f)));
}

void nothing_finite_becomes_infinite_and_nothing_else_becomes_finite() {
  for (const float x : {kLargest, std::numeric_limits<float>::max()}) {
    CHECK(nearest(x) == kLargest);
    CHECK(nearest(-x) == -kLargest);
    for (int column = 0; column < 100; ++column) CHECK(by_chance(x, 7, column) == kLargest);
  }
  CHECK(nearest(kInfinity) == kInfinity);
  CHECK(by_chance(-kInfinity, 7, 0) == -kInfinity);
  for (const std::uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffc00000u}) {  // NaNs, of whatever low bits
    CHECK(std::isnan(nearest(float_with(bits))));
    CHECK(std::isnan(by_chance(float_with(bits), 7, 0)));
  }
}

// The mean of many roundings, in units of the distance of the two neighbours, by IDs, steps or columns.
template <class Draw>
void check_unbiased(Draw draw) {
  constexpr int kTries = 40000;
  for (const float x : {0x1.01p0f, 0x1.004p-3f, -0x1.018p5f, 0x1.00fep0f, 0x1.8p-133f}) {
    const float down = bfloat16_value(bits_of(x) >> 16);  // toward zero
    const float up = bfloat16_value((bits_of(x) >> 16) + 1);
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
}

void rounding_by_chance_is_right_in_the_mean() {
  check_unbiased([](float x, int i) { return by_chance(x, rounding_key(mix(i), mix(1), 5), 3); });  // IDs
  check_unbiased([](float x, int i) { return by_chance(x, rounding_key(mix(9), mix(1), i), 3); });  // steps
  check_unbiased([](float x, int i) { return by_chance(x, rounding_key(mix(9), mix(1), 5), i); });  // columns
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
  for (const std::size_t count : {1, 3, 8, 16, 17, 31, 40, 64, 100, 128}) {
    std::vector<float> values(count);
    for (float& value : values) value = float_with(static_cast<std::uint32_t>(random()));  // NaNs, too
    for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
      if (level > best_simd_level()) continue;
      const Bfloat16Kernels kernels = bfloat16_kernels(static_cast<int>(count), level);
      std::vector<std::byte> codes(2 * count);
      std::vector<float> seen(count);
      const auto check = [&](auto wanted) {
        kernels.widen(codes.data(), seen.data(), count);
        for (std::size_t i = 0; i < count; ++i) CHECK(bits_of(seen[i]) == wanted(static_cast<int>(i)) << 16);
      };
      kernels.round_to_nearest(values.data(), codes.data(), count);
      check([&](int i) { return nearest_bfloat16(values[i]); });
      kernels.round_by_chance(values.data(), codes.data(), count, 0x123456789abcdefULL);
      check([&](int i) { return stochastic_bfloat16(values[i], 0x123456789abcdefULL, i); });
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

void a_row_has_half_the_bytes_of_values_and_all_of_state() {
  const auto bytes = [](OptimizerKind kind, int dim, ValueStorage storage) {
    return Table(table_of(kind, dim, storage)).row_bytes();
  };
  for (const ValueStorage storage : {ValueStorage::kBfloat16Nearest, ValueStorage::kBfloat16Stochastic}) {
    CHECK(bytes(OptimizerKind::kSgd, 64, storage) == 128);
    CHECK(bytes(OptimizerKind::kAdagrad, 64, storage) == 128 + 256);
    CHECK(bytes(OptimizerKind::kAdagrad, 3, storage) == 32);  // 6, padded to 8, and 12, padded to 16
    CHECK(bytes(OptimizerKind::kGroupAdagrad, 64, storage) == 144);
  }
  CHECK(bytes(OptimizerKind::kSgd, 64, ValueStorage::kFloat32) == 256);
}

// A thousand steps of 1/1000 of a value: to the nearest the value never moves, by chance its mean does.
void small_steps_add_up_by_chance_and_are_lost_to_the_nearest() {
  constexpr std::size_t kRows = 512;
  std::vector<std::int64_t> ids(kRows);
  for (std::size_t i = 0; i < kRows; ++i) ids[i] = static_cast<std::int64_t>(i);
  const std::vector<float> ones(kRows, 1.0f);
  const std::vector<float> rate{1e-3f};
  const auto mean = [&](ValueStorage storage) {
    Table table(table_of(OptimizerKind::kSgd, 1, storage));
    table.assign(ids, ones.data(), {});
    for (int step = 0; step < 1000; ++step)
      table.apply_gradients(ids, ones.data(), nullptr, rate, step, {}, true);
    std::vector<float> seen(kRows);
    table.lookup(ids, seen.data());
    double sum = 0;
    for (const float value : seen) sum += value;
    return sum / kRows;
  };
  CHECK(mean(ValueStorage::kBfloat16Nearest) == 1.0);
  CHECK(std::abs(mean(ValueStorage::kBfloat16Stochastic)) < 0.02);
  CHECK(std::abs(mean(ValueStorage::kFloat32)) < 1e-4);
}

}  // namespace
}  // namespace monolith

int main() {
  return monolith::check::run({
      {"the nearest is found and ties go to even", monolith::the_nearest_is_found_and_ties_go_to_even},
      {"nothing finite becomes infinite and nothing else becomes finite",
       monolith::nothing_finite_becomes_infinite_and_nothing_else_becomes_finite},
      {"rounding by chance is right in the mean", monolith::rounding_by_chance_is_right_in_the_mean},
      {"chances do not go together", monolith::chances_do_not_go_together},
      {"every level gives the same bits", monolith::every_level_gives_the_same_bits},
      {"a row has half the bytes of values and all of state",
       monolith::a_row_has_half_the_bytes_of_values_and_all_of_state},
      {"small steps add up by chance and are lost to the nearest",
       monolith::small_steps_add_up_by_chance_and_are_lost_to_the_nearest},
  });
}
