#include "snappy.h"

#include <algorithm>
#include <cstdint>

namespace monolith {
namespace {

constexpr std::uint64_t kMostGrowth = 32;

// The length a block promises, as a varint of at most 32 bits; false if the block ends inside it.
bool read_length(std::span<const std::byte> block, std::size_t& at, std::uint64_t& length) {
  length = 0;
  for (unsigned shift = 0; shift < 35; shift += 7) {
    if (at == block.size()) return false;
    const auto byte = static_cast<std::uint64_t>(block[at++]);
    length |= (byte & 0x7f) << shift;
    if (byte < 0x80) return length <= UINT32_MAX;
  }
  return false;
}

}  // namespace

std::string snappy_decode(std::span<const std::byte> block, std::vector<std::byte>& out) {
  out.clear();
  std::size_t at = 0;
  std::uint64_t promised = 0;
  if (!read_length(block, at, promised)) return "no length at the beginning of a snappy block";
  if (promised > kMostGrowth * block.size())
    return "a snappy block of " + std::to_string(block.size()) + " bytes cannot hold the " +
           std::to_string(promised) + " that it promises";
  out.reserve(promised);
  // Little-endian bytes of a length or an offset after the tag; the caller has checked that they are there.
  const auto number = [&](std::size_t bytes) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value |= static_cast<std::uint64_t>(block[at + i]) << 8 * i;
    at += bytes;
    return value;
  };
  while (at < block.size()) {
    const std::size_t element = at;
    const auto broken = [&](const char* why) {
      return std::string(why) + " at byte " + std::to_string(element) + " of a snappy block";
    };
    const auto tag = static_cast<unsigned>(block[at++]);
    const unsigned kind = tag & 3, upper = tag >> 2;
    const std::size_t extra = kind == 0 ? (upper < 60 ? 0 : upper - 59) : kind == 3 ? 4 : kind;
    if (extra > block.size() - at) return broken("the block ends inside the element");
    if (kind == 0) {  // a literal: its length, then its bytes
      const std::uint64_t length = (upper < 60 ? upper : number(extra)) + 1;
      if (length > block.size() - at) return broken("a literal is longer than the rest");
      if (length > promised - out.size()) return broken("more output than promised");
      const auto bytes = block.subspan(at, length);
      out.insert(out.end(), bytes.begin(), bytes.end());
      at += length;
      continue;
    }
    // A copy of the output `offset` bytes before; the two may overlap, and then repeat themselves.
    const std::uint64_t length = kind == 1 ? 4 + (upper & 7) : upper + 1;
    const std::uint64_t offset = kind == 1 ? (upper >> 3) << 8 | number(1) : number(extra);
    if (offset == 0 || offset > out.size()) return broken("a copy from outside the output");
    if (length > promised - out.size()) return broken("more output than promised");
    for (std::uint64_t i = 0; i < length; ++i) out.push_back(out[out.size() - offset]);
  }
  if (out.size() != promised)
    return "a snappy block promises " + std::to_string(promised) + " bytes and has " +
           std::to_string(out.size());
  return {};
}

}  // namespace monolith
