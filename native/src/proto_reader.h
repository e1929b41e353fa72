// Reading protobuf messages field by field, straight from bytes and never past their end.
//
// Input may come from anyone, so whatever does not read as a message throws BadMessage, which the code that
// reads a whole record catches: a bad record is an answer, not a crash. Groups, which nothing of ours has
// ever used, count as malformed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace monolith {

static_assert(std::endian::native == std::endian::little, "numbers are stored as they lie in memory");

enum Wire : std::uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// Thrown while reading one record; never leaves the core.
struct BadMessage {
  std::string reason;
};

// Walks the fields of one message and never past its end.
class ProtoReader {
 public:
  explicit ProtoReader(std::span<const std::byte> bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

  // Goes to the next field, whose value must then be taken or skipped; false at the end.
  bool next() {
    if (at_ == end_) return false;
    const std::uint64_t key = varint();
    field_ = key >> 3;
    wire_ = static_cast<std::uint8_t>(key & 7);
    if (field_ == 0 || field_ >= 1u << 29) refuse("field number out of range");
    return true;
  }
  bool is(std::uint32_t field, Wire wire) const { return field_ == field && wire_ == wire; }
  std::uint64_t field() const { return field_; }
  std::uint8_t wire() const { return wire_; }
  bool at_end() const { return at_ == end_; }

  std::uint64_t varint() {
    if (at_ != end_ && static_cast<std::uint8_t>(*at_) < 0x80) return static_cast<std::uint8_t>(*at_++);
    return long_varint();
  }
  std::uint64_t fixed64() { return fixed<std::uint64_t>(); }
  float float32() { return fixed<float>(); }
  double float64() { return fixed<double>(); }
  std::span<const std::byte> bytes() {
    const std::uint64_t size = varint();
    return {take(size), static_cast<std::size_t>(size)};
  }
  void skip() {
    switch (wire_) {
      case kVarint:
        varint();
        return;
      case kFixed64:
        take(8);
        return;
      case kBytes:
        bytes();
        return;
      case kFixed32:
        take(4);
        return;
      default:
        throw BadMessage{"malformed message: wire type " + std::to_string(wire_)};
    }
  }
  // Appends the floats of this field, packed or not, behind the `have` already at `to`, and those of the
  // same field that follow. Floats past `room` are counted and not stored, so that the caller can say
  // how many came. Only for fields below 16.
  std::size_t floats(float* to, std::size_t have, std::size_t room) {
    constexpr std::ptrdiff_t kFloatField = 1 + sizeof(float);
    if (wire_ == kBytes) {
      const auto packed = bytes();
      if (packed.size() % sizeof(float) != 0) refuse("packed floats end inside a float");
      const std::size_t count = packed.size() / sizeof(float);
      if (have < room && count > 0)
        std::memcpy(to + have, packed.data(), std::min(count, room - have) * sizeof(float));
      return have + count;
    }
    const auto again = static_cast<std::byte>(field_ << 3 | kFixed32);
    const std::byte* from = take(sizeof(float));
    for (;; from += kFloatField, at_ += kFloatField) {
      if (have < room) std::memcpy(to + have, from, sizeof(float));
      ++have;
      if (end_ - at_ < kFloatField || *at_ != again) return have;
    }
  }

 private:
  // Kept out of varint(), so that what is mostly one byte is read in place.
  [[gnu::noinline]] std::uint64_t long_varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      const auto byte = static_cast<std::uint64_t>(*take(1));
      value |= (byte & 0x7f) << shift;  // the tenth byte keeps one bit, as protobuf does
      if (byte < 0x80) return value;
    }
    refuse("a varint of more than ten bytes");
  }
  [[noreturn, gnu::noinline]] static void refuse(const char* what) {
    throw BadMessage{std::string("malformed message: ") + what};
  }
  template <class T>
  T fixed() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  const std::byte* take(std::uint64_t size) {
    if (size > static_cast<std::uint64_t>(end_ - at_)) refuse("a field reaches past the end");
    const std::byte* from = at_;
    at_ += size;
    return from;
  }

  const std::byte* at_;
  const std::byte* end_;
  std::uint64_t field_ = 0;
  std::uint8_t wire_ = 0;
};

}  // namespace monolith
