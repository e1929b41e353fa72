// CRC-32C (Castagnoli), the checksum of TFRecord files and of our own shards.
//
// The processor's CRC instruction is used where there is one, asked for at run
// time, so one binary serves every machine of its kind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace monolith {

// The CRC-32C of `bytes`. Handing the result of one call to the next as `seed`
// gives the CRC of both runs of bytes joined.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// The same without special instructions: the answer on old machines, and what
// the tests hold the fast path against.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// What a TFRecord stores in place of a CRC, so that a CRC over data that itself
// holds CRCs stays sound.
inline constexpr std::uint32_t masked(std::uint32_t crc) {
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

inline std::uint32_t masked_crc32c(std::span<const std::byte> bytes) {
  return masked(crc32c(bytes));
}

}  // namespace monolith
