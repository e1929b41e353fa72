// bfloat16: a float32 without its low 16 bits, as a table may store embeddings.
//
// Its 8 bits of exponent are those of float32, its 8 bits of precision are few: a step that changes a weight
// by less than 1/512 of it is lost when it is rounded to the nearest. Rounded by chance, up as often as the
// fraction that is cut off is large, the mean of many small steps is right.
//
// The chance is a hash, not a generator: it depends on the ID, the step, the column and the bits of the
// value, so that a run gives the same bits again, on every device and with any number of threads. The
// reference in numpy is src/monolith/table/compressors.py.
#pragma once

#include "hash.h"

namespace monolith {

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
  const u32 bits = bits_of(x);
  return bfloat16_code(bits, 0x7fff + (bits >> 16 & 1));  // ties to even
}

// What the chances of one row at one step follow from. `hash` is that of the ID.
MONOLITH_SHARED u64 rounding_key(u64 hash, u64 mixed_seed, i64 step) {
  return mix(hash + mixed_seed + mix(static_cast<u64>(step)));
}

// Up with a chance of (low half / 2^16). All arithmetic is on 32 bits, which registers hold many of. The bits
// of the value are part of the hash for callers that take several steps by one number.
MONOLITH_SHARED u32 stochastic_bfloat16(float x, u64 key, int column) {
  const u32 bits = bits_of(x);
  u32 h = (bits ^ static_cast<u32>(key)) + 0x9e3779b9u * static_cast<u32>(column + 1);
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15 ^ static_cast<u32>(key >> 32)) * 0x846ca68bu;
  return bfloat16_code(bits, h >> 16);
}

}  // namespace monolith
