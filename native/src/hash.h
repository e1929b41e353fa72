// The one hash of the system: a bijection on 64-bit ids.
//
// It is the same in every process and on every machine, so filters and shard
// cursors mean the same thing after a restart. Being a bijection, the table can
// store the hash in place of the id and recover the id when asked.
#pragma once

#include <cstdint>

namespace monolith {

inline constexpr std::uint64_t mix(std::int64_t id) {
  auto h = static_cast<std::uint64_t>(id);
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ULL;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ULL;
  h ^= h >> 32;
  return h;
}

inline std::int64_t unmix(std::uint64_t h) {
  h ^= h >> 32;
  h *= 0xcfee444d8b59a89bULL;  // the inverse of the multiplier above, modulo 2^64
  h ^= h >> 32;
  h *= 0xcfee444d8b59a89bULL;
  h ^= h >> 32;
  return static_cast<std::int64_t>(h);
}

// The slot of a version-2 feature id: bits 48 to 62.
inline std::uint32_t slot_of(std::int64_t id) {
  return static_cast<std::uint64_t>(id) >> 48 & 0x7fff;
}

inline constexpr std::uint32_t kMaxSlots = 1u << 15;

}  // namespace monolith
