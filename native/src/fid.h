// Feature ids: a slot in the high bits, a signature in the low ones.
//
// Strings and numbers become signatures by the one hash of the system, so a word has the same
// feature id in every process.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "hash.h"

namespace monolith {

// Bits of the signature. Version 1 has 10 bits of slot above it, version 2 has 15 below a zero bit.
inline constexpr int kSignatureBits[] = {54, 48};

inline std::int64_t make_fid(int version, std::uint32_t slot, std::uint64_t signature) {
  const int bits = kSignatureBits[version - 1];
  return static_cast<std::int64_t>(std::uint64_t{slot} << bits | (signature & ((1ULL << bits) - 1)));
}

// What the hash of a text begins with, by its length: a third of the work for a short one.
inline constexpr auto kLengthHashes = [] {
  std::array<std::uint64_t, 64> hashes{};
  for (std::size_t size = 0; size < hashes.size(); ++size)
    hashes[size] = mix(static_cast<std::int64_t>(size));
  return hashes;
}();

// Eight bytes at a time, low byte first; the last ones are filled up with zeros, which the length, where the
// hash begins, tells from zeros in the text.
inline std::uint64_t hash_bytes(std::span<const std::byte> text) {
  std::uint64_t hash = text.size() < kLengthHashes.size() ? kLengthHashes[text.size()]
                                                          : mix(static_cast<std::int64_t>(text.size()));
  std::uint64_t word = 0;
  std::size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    std::memcpy(&word, text.data() + at, 8);
    hash = mix(static_cast<std::int64_t>(hash ^ word));
  }
  const std::size_t rest = text.size() - at;
  if (rest == 0) return hash;
  if (at > 0) {  // the last eight bytes, without those that were in the word before
    std::memcpy(&word, text.data() + text.size() - 8, 8);
    word >>= 8 * (8 - rest);
  } else {
    word = 0;
    for (std::size_t i = 0; i < rest; ++i)
      word |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(text[i])) << 8 * i;
  }
  return mix(static_cast<std::int64_t>(hash ^ word));
}
static_assert(std::endian::native == std::endian::little);

// Equal numbers hash alike: both zeros, and whatever is not a number.
inline std::uint64_t hash_float(float number) {
  if (number == 0) number = 0;
  if (std::isnan(number)) number = std::numeric_limits<float>::quiet_NaN();
  return mix(static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(number)));
}

}  // namespace monolith
