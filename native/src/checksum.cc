#include "checksum.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace monolith {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // reflected: bit 31 is the coefficient of x^0

// The product of two polynomials over GF(2), modulo the CRC's own.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? b >> 1 ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * bytes): multiplying a CRC register by it appends that many zero bytes.
constexpr std::uint32_t zeros(std::size_t bytes) {
  std::uint32_t result = 1u << 31, power = 1u << 23;  // 1 and x^8
  for (; bytes != 0; bytes >>= 1) {
    if (bytes & 1) result = multiply(result, power);
    power = multiply(power, power);
  }
  return result;
}

using Table = std::array<std::uint32_t, 256>;

// kSlices[k][b] is the register after byte b and then k zero bytes.
constexpr std::array<Table, 8> kSlices = [] {
  std::array<Table, 8> slices{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    slices[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::uint32_t b = 0; b < 256; ++b)
      slices[k][b] = slices[k - 1][b] >> 8 ^ slices[0][slices[k - 1][b] & 0xff];
  return slices;
}();

std::uint64_t word_at(const std::byte* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

std::uint32_t portable(std::uint32_t crc, const std::byte* at, std::size_t size) {
  for (; size >= 8; at += 8, size -= 8) {
    const std::uint64_t word = word_at(at) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= kSlices[7 - k][word >> 8 * k & 0xff];
  }
  for (; size > 0; ++at, --size) crc = crc >> 8 ^ kSlices[0][(crc ^ static_cast<std::uint32_t>(*at)) & 0xff];
  return crc;
}

#if defined(__aarch64__) || defined(__x86_64__)

#if defined(__aarch64__)
#define MONOLITH_WITH_CRC __attribute__((target("+crc")))
MONOLITH_WITH_CRC inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) {
  return __crc32cd(crc, word);
}
MONOLITH_WITH_CRC inline std::uint32_t step(std::uint32_t crc, std::byte byte) {
  return __crc32cb(crc, static_cast<std::uint8_t>(byte));
}
bool machine_has_crc() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  return true;  // every other ARM machine we build for is newer than ARMv8.1, where it is mandatory
#endif
}
#else
#define MONOLITH_WITH_CRC __attribute__((target("sse4.2")))
MONOLITH_WITH_CRC inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
MONOLITH_WITH_CRC inline std::uint32_t step(std::uint32_t crc, std::byte byte) {
  return _mm_crc32_u8(crc, static_cast<std::uint8_t>(byte));
}
bool machine_has_crc() {
  return __builtin_cpu_supports("sse4.2");
}
#endif

constexpr std::size_t kLane = 1024;

// kPastLane[k][b] appends kLane zero bytes to a register holding b in byte k.
constexpr std::array<Table, 4> kPastLane = [] {
  std::array<Table, 4> tables{};
  const std::uint32_t operand = zeros(kLane);
  for (std::uint32_t k = 0; k < 4; ++k)
    for (std::uint32_t b = 0; b < 256; ++b) tables[k][b] = multiply(b << 8 * k, operand);
  return tables;
}();

std::uint32_t past_lane(std::uint32_t crc) {
  return kPastLane[0][crc & 0xff] ^ kPastLane[1][crc >> 8 & 0xff] ^ kPastLane[2][crc >> 16 & 0xff] ^
         kPastLane[3][crc >> 24];
}

// The instruction answers after three cycles but starts every cycle, so three
// lanes run side by side and are joined by shifting.
MONOLITH_WITH_CRC std::uint32_t accelerated(std::uint32_t crc, const std::byte* at, std::size_t size) {
  for (; size >= 3 * kLane; at += 3 * kLane, size -= 3 * kLane) {
    std::uint32_t second = 0, third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      crc = step(crc, word_at(at + i));
      second = step(second, word_at(at + kLane + i));
      third = step(third, word_at(at + 2 * kLane + i));
    }
    crc = past_lane(past_lane(crc) ^ second) ^ third;
  }
  for (; size >= 8; at += 8, size -= 8) crc = step(crc, word_at(at));
  for (; size > 0; ++at, --size) crc = step(crc, *at);
  return crc;
}

#else

bool machine_has_crc() {
  return false;
}
std::uint32_t accelerated(std::uint32_t crc, const std::byte* at, std::size_t size) {
  return portable(crc, at, size);
}

#endif

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
  static const auto update = machine_has_crc() ? accelerated : portable;
  return ~update(~seed, bytes.data(), bytes.size());
}

std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t seed) {
  return ~portable(~seed, bytes.data(), bytes.size());
}

}  // namespace monolith
