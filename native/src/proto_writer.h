// Writing protobuf messages where their size is known beforehand.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "proto_reader.h"

namespace monolith {

inline std::size_t varint_size(std::uint64_t value) {
  return (std::bit_width(value | 1) + 6) / 7;
}

inline std::byte* put_varint(std::byte* at, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = static_cast<std::byte>(value | 0x80);
  *at++ = static_cast<std::byte>(value);
  return at;
}

// A field's key, of any field number.
inline std::size_t key_size(std::uint32_t field) {
  return varint_size(std::uint64_t{field} << 3);
}

inline std::byte* put_key(std::byte* at, std::uint32_t field, Wire wire) {
  return put_varint(at, std::uint64_t{field} << 3 | wire);
}

// Bytes of a field that holds `size` bytes, and its beginning: all but those bytes.
inline std::size_t bytes_field(std::uint32_t field, std::size_t size) {
  return key_size(field) + varint_size(size) + size;
}

inline std::byte* put_bytes_header(std::byte* at, std::uint32_t field, std::size_t size) {
  return put_varint(put_key(at, field, kBytes), size);
}

}  // namespace monolith
