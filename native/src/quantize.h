// Quantizers: half precision, fixed-range int8 and one bit, as stored by serving rows and as seen by
// training lookups.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace monolith {

// IEEE half precision, round to nearest even.
inline std::uint16_t half_of(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);   // NaN
  if (magnitude >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // rounds past 65504
  if (magnitude < 0x38800000) {                                                   // subnormal half
    // Adding 0.5 lets the adder itself shift and round the significand to units of 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000));
  }
  const std::uint32_t odd = magnitude >> 13 & 1;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

inline float float_of(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
  const std::uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {
    const float tiny = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(tiny));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000));
}

// The half-precision neighbour of `value` chosen by chance: up when p, uniform in [0, 1), does not
// exceed the share of the way from the lower to the upper neighbour. Exact values stay, larger ones than
// half precision knows become its largest.
inline float round_to_half(float value, float p) {
  constexpr float kLargestHalf = 65504.0f;
  if (!std::isfinite(value)) return value;
  if (std::abs(value) >= kLargestHalf) return std::copysign(kLargestHalf, value);
  const std::uint16_t nearest = half_of(value);
  const float exact = float_of(nearest);
  if (exact == value) return value;
  // One step up or down the number line; halves are ordered like sign-magnitude integers.
  const auto step = [](std::uint16_t h, bool up) {
    const bool negative = (h & 0x8000) != 0;
    if ((h & 0x7fff) == 0) return static_cast<std::uint16_t>(up ? 0x0001 : 0x8001);
    return static_cast<std::uint16_t>(up != negative ? h + 1 : h - 1);
  };
  const float down = exact < value ? exact : float_of(step(nearest, false));
  const float up = exact > value ? exact : float_of(step(nearest, true));
  return p <= (value - down) / (up - down) ? up : down;
}

// Fixed range: 256 steps over [-range, range).
inline std::int8_t r8_code(float value, float range) {
  const float step = range / 128.0f;
  if (std::isnan(value)) return 0;
  const float scaled = (value + std::copysign(step * 0.5f, value == 0 ? 1.0f : value)) / step;
  return static_cast<std::int8_t>(std::clamp(std::trunc(scaled), -128.0f, 127.0f));
}
inline float r8_value(std::int8_t code, float range) {
  return static_cast<float>(code) * (range / 128.0f);
}

// One bit, softened for training: amplitude * tanh(scale * x), with a scale that grows by the step.
inline float one_bit_forward(float x, float scale, float amplitude) {
  return amplitude * std::tanh(scale * x);
}
inline float one_bit_slope(float x, float scale, float amplitude) {
  const float t = std::tanh(scale * x);
  return amplitude * scale * (1 - t * t);
}

}  // namespace monolith
