// Quantizers: half precision, fixed-range int8 and one bit, as serving rows store them and as training
// lookups see them. The reference in numpy is src/monolith/table/compressors.py.
#pragma once

#include "portable.h"

namespace monolith {

// IEEE half precision, round to nearest even; the code is in the low 16 bits.
MONOLITH_SHARED u32 half_of(float value) {
  const u32 bits = bits_of(value);
  const u32 sign = bits >> 16 & 0x8000;
  const u32 magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds past 65504
  // A subnormal half: adding 0.5 lets the adder itself shift and round the significand to units of 2^-24.
  if (magnitude < 0x38800000) return sign | (bits_of(float_with(magnitude) + 0.5f) - 0x3f000000);
  const u32 odd = magnitude >> 13 & 1;
  return sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

MONOLITH_SHARED float float_of(u32 half) {
  const u32 sign = (half & 0x8000) << 16;
  const u32 magnitude = half & 0x7fff;
  const u32 bits = (magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000 : 0x38000000);
  // A subnormal half: the exponent after its own holds its significand, and one more.
  const u32 small = bits_of(float_with(bits + 0x00800000) - 0x1p-14f);
  return float_with(sign | (magnitude < 0x400 ? small : bits));
}

// The next half up or down the number line; halves are ordered like sign-magnitude integers.
MONOLITH_SHARED u32 next_half(u32 half, bool up) {
  if ((half & 0x7fff) == 0) return up ? 0x0001 : 0x8001;
  return (up != ((half & 0x8000) != 0) ? half + 1 : half - 1) & 0xffff;
}

// The half-precision neighbour of `value` chosen by chance: up if p, uniform in [0, 1), does not exceed the
// fraction of the way from the lower to the upper neighbour. Exact values stay; values beyond the largest
// half become it.
MONOLITH_SHARED float round_to_half(float value, float p) {
  constexpr float kLargestHalf = 65504.0f;
  if (!is_finite(value)) return value;
  if (magnitude_of(value) >= kLargestHalf) return with_sign(kLargestHalf, value);
  const u32 nearest = half_of(value);
  const float exact = float_of(nearest);
  if (exact == value) return value;
  const float down = exact < value ? exact : float_of(next_half(nearest, false));
  const float up = exact > value ? exact : float_of(next_half(nearest, true));
  return p <= (value - down) / (up - down) ? up : down;
}

// Fixed range: 256 steps over [-range, range); the code is -128 to 127.
MONOLITH_SHARED int r8_code(float value, float range) {
  const float step = range / 128.0f;
  if (value != value) return 0;  // NaN
  const float scaled = (value + with_sign(step * 0.5f, value == 0 ? 1.0f : value)) / step;
  // Clamped as a float: an integer made of infinity is undefined.
  const float whole = whole_part(scaled);
  return static_cast<int>(whole < -128.0f ? -128.0f : whole > 127.0f ? 127.0f : whole);
}

MONOLITH_SHARED float r8_value(int code, float range) {
  return static_cast<float>(code) * (range / 128.0f);
}

// One bit, softened for training: amplitude * tanh(scale * x), with a scale that grows by the step.
MONOLITH_SHARED float one_bit_forward(float x, float scale, float amplitude) {
  return amplitude * tanh_of(scale * x);
}

MONOLITH_SHARED float one_bit_slope(float x, float scale, float amplitude) {
  const float t = tanh_of(scale * x);
  return amplitude * scale * (1 - t * t);
}

}  // namespace monolith
