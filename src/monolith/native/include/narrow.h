// Narrow values: what a table may store embeddings as in place of float32.
//
//   bfloat16   float32 without its low 16 bits: its range, 8 bits of precision
//   float16    IEEE half precision: up to 65504, 11 bits of precision, multiples of 2^-24 below 2^-14
//   int8       -127 to 127, times a scale that neighbouring values share: the largest of them / 127
//
// All are rounded by one rule: something is added to the bits of a float, and its low bits are cut off. To
// the nearest, a step that changes a weight by less than half the distance of its neighbours is lost, however
// often it comes. By chance, up as often as the part that is cut off is large, the mean of many steps is
// right.
//
// The chance is a hash, not a generator: it depends on the ID, the step, the column and the bits of the
// value, so that a run gives the same bits again, on every device and with any number of threads. The
// reference in numpy is src/monolith/table/compressors.py.
#pragma once

#include "hash.h"
#include "quantize.h"

namespace monolith {

// What to add to bits whose low `cut` bits are cut off then: for the nearest, ties to even.
MONOLITH_SHARED u32 to_nearest(u32 bits, int cut) {
  return (1u << (cut - 1)) - 1 + (bits >> cut & 1);
}

// What the chances of one row at one step follow from. `hash` is that of the ID.
MONOLITH_SHARED u64 rounding_key(u64 hash, u64 mixed_seed, i64 step) {
  return mix(hash + mixed_seed + mix(static_cast<u64>(step)));
}

// The same by chance: `cut` bits of a hash. All arithmetic is on 32 bits, which registers hold many of. The
// bits of the value are part of the hash for callers that take several steps by one number.
MONOLITH_SHARED u32 by_chance(u32 value, u64 key, int column, int cut) {
  u32 h = (value ^ static_cast<u32>(key)) + 0x9e3779b9u * static_cast<u32>(column + 1);
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15 ^ static_cast<u32>(key >> 32)) * 0x846ca68bu;
  return h >> (32 - cut);
}

// ---- bfloat16 ------------------------------------------------------------------------------------

MONOLITH_SHARED float bfloat16_value(u32 code) {
  return float_with(code << 16);
}

// Adds `more`, less than 2^16, to the bits of a float32 and cuts off the low half. Nothing finite becomes
// infinite, since a weight must survive rounding: beyond the largest bfloat16 the low half is cut off.
MONOLITH_SHARED u32 bfloat16_code(u32 bits, u32 more) {
  const u32 cut = bits >> 16;
  const u32 magnitude = bits & 0x7fffffff;
  const u32 large = magnitude > 0x7f800000 ? cut | 0x40 : cut;  // a NaN stays one
  return magnitude >= 0x7f7f0000 ? large : (bits + more) >> 16;
}

MONOLITH_SHARED u32 nearest_bfloat16(float x) {
  return bfloat16_code(bits_of(x), to_nearest(bits_of(x), 16));
}

MONOLITH_SHARED u32 stochastic_bfloat16(float x, u64 key, int column) {
  return bfloat16_code(bits_of(x), by_chance(bits_of(x), key, column, 16));
}

// ---- float16 -------------------------------------------------------------------------------------

// Nothing finite becomes infinite here, either: beyond the largest half, a value is the largest.
MONOLITH_SHARED u32 nearest_float16(float x) {
  const u32 half = half_of(x);
  return (half & 0x7fff) == 0x7c00 && is_finite(x) ? half - 1 : half;
}

MONOLITH_SHARED u32 stochastic_float16(float x, u64 key, int column) {
  const u32 bits = bits_of(x);
  const auto magnitude = static_cast<int>(bits & 0x7fffffff);
  const int bounded = magnitude < 0x477fe000 ? magnitude : 0x477fe000;
  // In units of 2^-13 of the code. For a subnormal half, adding 2^-14 lets the adder shift the significand.
  const u32 small = bits_of(float_with(static_cast<u32>(bounded)) + 0x1p-14f) - 0x38800000;
  const u32 fine = bounded < 0x38800000 ? small : static_cast<u32>(bounded) - 0x38000000;
  const u32 code = (fine + by_chance(bits, key, column, 13)) >> 13;
  const u32 large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  return (bits >> 16 & 0x8000) | (magnitude >= 0x7f800000 ? large : code);
}

// ---- int8 ----------------------------------------------------------------------------------------

// The scale has 17 significant bits, so that its product with a code, of 7, is exact, and the value of the
// largest code / 127 is the scale again: a row that is read as float32 and written is the same to the bit.
inline constexpr int kScaleCut = 7;

// The scale before it is rounded, as bits, by the largest magnitude of the values that share it, as bits.
MONOLITH_SHARED u32 int8_share(u32 largest) {
  return bits_of(float_with(largest) / 127.0f);
}

// Rounded, with `more` less than 2^kScaleCut. Values of magnitudes that no float32 scale fits are zeros
// (below 3e-36) or saturate (above float32's largest less 1e-6 of it). A NaN or an infinity among the values
// makes NaNs of all of them.
MONOLITH_SHARED float int8_scale(u32 share, u32 more) {
  constexpr u32 kLeast = 0x01000000;  // 2^-125
  constexpr u32 kMost = 0x7c010200;   // times 127 it is finite
  const u32 rounded = (share + more) >> kScaleCut << kScaleCut;
  if (share >= 0x7f800000) return float_with(0x7fc00000);
  return float_with(rounded < kLeast ? 0 : rounded > kMost ? kMost : rounded);
}

// What values are multiplied by to get codes. By the largest and not by the scale, so that the code of the
// largest is 127 whichever way the scale was rounded, and that the means of both make the mean of a value.
MONOLITH_SHARED float int8_inverse(u32 largest, float scale) {
  return scale > 0 ? 127.0f / float_with(largest) : 0.0f;
}

// The integer part of a float from 256 to 512 is in its bits from 15 on. That sum also takes off what the
// product errs by, which is less than half its last bit: an integer stays one.
inline constexpr int kCodeCut = 15;
MONOLITH_SHARED u32 int8_raised(float x, float inverse) {
  return bits_of(x * inverse + 384.0f);
}
MONOLITH_SHARED u32 int8_code(u32 raised, u32 more) {
  return ((raised + more) >> kCodeCut & 0xff) ^ 0x80;
}

}  // namespace monolith
