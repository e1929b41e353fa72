// Digests: what rows hold, in eight bytes, to find out whether two places hold the same.
//
// The digest of a row depends on its id and on every bit of its values. Digests of many rows are added up
// modulo 2^64, so it does not matter in which order they are met. An id belongs to one of 4096 buckets, by
// the leading bits of its hash: a table is walked in that order.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hash.h"

namespace monolith {

inline constexpr int kBucketBits = 12;

inline std::uint64_t bucket_of(std::uint64_t hash) {
  return hash >> (64 - kBucketBits);
}

// mix(h + the sum of mix(h + 0x9e37... * (j + 1) + bits of value j)), where h is mix(id); modulo 2^64.
inline std::uint64_t row_digest(std::int64_t id, std::span<const float> values) {
  const std::uint64_t hash = mix(id);
  std::uint64_t sum = hash;
  for (std::size_t i = 0; i < values.size(); ++i) sum += value_digest(hash, static_cast<int>(i), values[i]);
  return mix(sum);
}

}  // namespace monolith
