// The one hash of the system, a bijection on 64-bit ids, and the random draws made from it.
//
// It is the same in every process and on every machine, so filters and shard cursors mean the same after a
// restart. Being a bijection, a table can store the hash in place of the id and recover the id when asked.
// The reference in numpy is src/monolith/table/hashing.py.
#pragma once

#include "portable.h"

namespace monolith {

MONOLITH_SHARED constexpr u64 mix(u64 h) {
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ULL;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ULL;
  h ^= h >> 32;
  return h;
}

MONOLITH_SHARED constexpr i64 unmix(u64 h) {
  h ^= h >> 32;
  h *= 0xcfee444d8b59a89bULL;  // the inverse of the multiplier above, modulo 2^64
  h ^= h >> 32;
  h *= 0xcfee444d8b59a89bULL;
  h ^= h >> 32;
  return static_cast<i64>(h);
}

// The slot of a version-2 feature id: bits 48 to 62.
MONOLITH_SHARED constexpr u32 slot_of(i64 id) {
  return static_cast<u64>(id) >> 48 & 0x7fff;
}

inline constexpr u32 kMaxSlots = 1u << 15;

// What a column adds to the hash of its row: the golden ratio times its number, counted from 1.
MONOLITH_SHARED constexpr u64 column_salt(int column) {
  return 0x9e3779b97f4a7c15ULL * static_cast<u64>(column + 1);
}

// A float32 in [0, 1), a multiple of 2^-24. It depends on its arguments alone, not on when or on which thread
// it is drawn: a row starts with the same values in every implementation, on every shard and after every
// restart.
MONOLITH_SHARED float draw(u64 salt, u64 mixed_seed, int column) {
  return static_cast<float>(mix(salt + mixed_seed + column_salt(column)) >> 40) * 0x1p-24f;
}

// What a value adds to the digest of its row, whose hash is given; see digest.h.
MONOLITH_SHARED u64 value_digest(u64 hash, int column, float value) {
  return mix(hash + column_salt(column) + bits_of(value));
}

}  // namespace monolith
