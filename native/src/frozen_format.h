// What the file of a frozen table is made of: shared by who writes it and who reads it.
//
// Numbers are little-endian, every part begins at a multiple of 64 bytes:
//
//    head       magic "MONOFRZN", version
//    rows       one after another, all of one size; a segment is floats, halves, or a float (the scale) and
//               codes of a byte or half a byte
//    index      buckets of one cache line, up to five ids in each, with the numbers of their rows
//    checksums  CRC-32C of every MiB of what is above
//    about      for each segment its width and coding; then the name
//    trailer    where all of it lies, what coding cost, CRCs of the two parts above and of itself
//
// An id is looked for in the bucket that its hash says and, as long as buckets say that an id overflowed to
// the next, in those after it. A reader believes nothing: see FrozenTable.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "hash.h"

namespace monolith {

static_assert(std::endian::native == std::endian::little, "files are mapped as they are");

enum class FrozenCoding : std::uint32_t {
  kFp32 = 0,
  kFp16 = 1,
  kInt8 = 2,  // a scale for each row and segment, the largest value being 127 of it
  kInt4 = 3,  // the same with 7, two codes in a byte, the first in its low half
};

// Whether each row has a scale of its own, and what its largest value is in it.
inline constexpr bool frozen_scaled(FrozenCoding coding) {
  return coding == FrozenCoding::kInt8 || coding == FrozenCoding::kInt4;
}
inline constexpr float frozen_steps(FrozenCoding coding) {
  return coding == FrozenCoding::kInt4 ? 7.0f : 127.0f;
}

struct FrozenSegment {
  std::uint32_t dim;
  FrozenCoding coding;

  std::size_t bytes() const {
    switch (coding) {
      case FrozenCoding::kFp32:
        return std::size_t{4} * dim;
      case FrozenCoding::kFp16:
        return std::size_t{2} * dim;
      case FrozenCoding::kInt8:
        return sizeof(float) + dim;
      case FrozenCoding::kInt4:
        return sizeof(float) + (dim + 1) / 2;
    }
    return 0;
  }
};

inline constexpr std::uint64_t kFrozenMagic = 0x4e5a52464f4e4f4d;     // "MONOFRZN"
inline constexpr std::uint64_t kFrozenEndMagic = 0x444e455f4e5a5246;  // "FRZN_END"
inline constexpr std::uint32_t kFrozenVersion = 1;
inline constexpr std::size_t kFrozenAlign = 64;
inline constexpr std::size_t kFrozenChecked = std::size_t{1} << 20;  // bytes under one checksum
inline constexpr std::uint64_t kFrozenMaxRows = UINT32_MAX;
inline constexpr std::size_t kFrozenMaxSegments = 1024;
inline constexpr std::size_t kFrozenMaxDim = std::size_t{1} << 20;  // of all segments together
inline constexpr std::size_t kFrozenMaxName = 4096;

struct FrozenHead {
  std::uint64_t magic = kFrozenMagic;
  std::uint32_t version = kFrozenVersion;
  std::uint32_t unused[13] = {};
};
static_assert(sizeof(FrozenHead) == kFrozenAlign);

struct FrozenBucket {
  static constexpr std::uint32_t kIds = 5;
  std::int64_t ids[kIds];
  std::uint32_t rows[kIds];
  std::uint8_t used;    // ids in here, the first ones
  std::uint8_t passed;  // 1: an id found no slot here and is in a later bucket
  std::uint16_t unused;
};
static_assert(sizeof(FrozenBucket) == kFrozenAlign);

struct FrozenTrailer {
  std::uint64_t magic;
  std::uint64_t file_bytes;
  std::uint64_t rows;
  std::uint64_t row_bytes;
  std::uint64_t index_at;
  std::uint64_t buckets;
  std::uint64_t checksums_at;
  std::uint64_t about_at;
  std::uint32_t segments;
  std::uint32_t name_bytes;
  std::uint32_t longest;  // buckets that one has to look into, at most, to find an id that is there
  std::uint32_t version;
  std::uint32_t checksums_crc;
  std::uint32_t about_crc;
  double largest_error;
  double mean_error;
  std::uint32_t unused[5];
  std::uint32_t crc;  // of all of the above
};
static_assert(sizeof(FrozenTrailer) == 2 * kFrozenAlign);

inline constexpr std::uint64_t frozen_padded(std::uint64_t bytes) {
  return (bytes + kFrozenAlign - 1) / kFrozenAlign * kFrozenAlign;
}

inline std::size_t frozen_row_bytes(std::span<const FrozenSegment> segments) {
  std::size_t bytes = 0;
  for (const FrozenSegment& segment : segments) bytes += segment.bytes();
  return (bytes + 3) / 4 * 4;
}

// A file makes no sense, or has changed since it was written.
class FrozenDamage : public std::runtime_error {
 public:
  FrozenDamage(std::string path, std::uint64_t offset, const std::string& reason)
      : std::runtime_error(reason), path_(std::move(path)), offset_(offset) {}
  const std::string& path() const { return path_; }
  std::uint64_t offset() const { return offset_; }  // the byte at which it stopped making sense

 private:
  std::string path_;
  std::uint64_t offset_;
};

// The bucket that an id is looked for in first.
inline std::uint64_t frozen_home(std::int64_t id, std::uint64_t buckets) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(static_cast<Wide>(mix(id)) * buckets >> 64);
}

}  // namespace monolith
