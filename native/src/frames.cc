#include "frames.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace monolith {
namespace {

static_assert(std::endian::native == std::endian::little, "lengths are stored little-endian");

constexpr std::uint64_t kInvalidLength = 0xfefefefe;
constexpr std::uint64_t kMaxLength = std::numeric_limits<std::int32_t>::max();  // of a message
constexpr std::size_t kNumber = sizeof(std::uint64_t);

// Walks one frame. Past the end of the buffer it only notes that it ended.
class FrameReader {
 public:
  FrameReader(std::span<const std::byte> buffer, std::size_t at) : buffer_(buffer), at_(at) {}

  std::uint64_t number() {
    std::uint64_t value = 0;
    const std::size_t from = at_;
    if (skip(kNumber)) std::memcpy(&value, buffer_.data() + from, sizeof value);
    return value;
  }
  bool skip(std::uint64_t size) {
    if (size > kMaxLength) stray_ = true;
    if (ended_ || size > buffer_.size() - at_) ended_ = true;
    if (!ended_) at_ += size;
    return !ended_;
  }
  std::size_t at() const { return at_; }
  bool ended() const { return ended_; }
  bool stray() const { return stray_; }  // a size was none

 private:
  std::span<const std::byte> buffer_;
  std::size_t at_;
  bool ended_ = false, stray_ = false;
};

std::size_t header_size(const FrameHeader& header) {
  if (header.tag) return kNumber;
  return kNumber * (2 * header.kafka_dump_prefix + header.sort_id + header.kafka_dump);
}

}  // namespace

SplitStream split_frames(std::span<const std::byte> buffer, const FrameHeader& header) {
  SplitStream split;
  while (split.consumed < buffer.size()) {
    FrameReader frame(buffer, split.consumed);
    std::uint64_t tag = 0;
    if (header.tag) {
      tag = frame.number();
    } else {
      std::uint64_t sort_id = 0;
      if (header.kafka_dump_prefix) {
        sort_id = frame.number();
        if (sort_id == 0) frame.number();
      }
      if (header.sort_id) frame.skip(sort_id != 0 ? sort_id : frame.number());
      if (header.kafka_dump) frame.number();
    }
    const std::uint64_t length = frame.number();
    const std::size_t payload = frame.at();
    if (length == kInvalidLength) {
      split.failure = "the length of a record is the mark of an invalid one, 0xfefefefe";
      return split;
    }
    // Without a checksum a wrong length is only noticed by what it says.
    if (length > kMaxLength || frame.stray()) {
      split.failure = "a length that no record has. See whether frames have the header that was named";
      return split;
    }
    frame.skip(length);
    if (frame.ended()) {
      split.failure = "truncated record: " + std::to_string(buffer.size() - split.consumed) +
                      " bytes left of a record of more";
      split.truncated = true;
      return split;
    }
    split.starts.push_back(static_cast<std::int64_t>(split.consumed));
    split.offsets.push_back(static_cast<std::int64_t>(payload));
    split.lengths.push_back(static_cast<std::int64_t>(length));
    if (header.tag) split.headers.push_back(static_cast<std::int64_t>(tag));
    split.consumed = frame.at();
  }
  return split;
}

std::vector<std::byte> seal_frames(std::span<const std::byte> data, std::span<const std::int64_t> splits,
                                   const FrameHeader& header, std::span<const std::int64_t> tags) {
  check_payload_splits(splits, data.size());
  const std::size_t count = splits.size() - 1;
  if (tags.size() != (header.tag ? count : 0))
    throw std::invalid_argument("frames need one tag each if they have tags, and none otherwise");
  const std::size_t head = header_size(header);
  std::vector<std::byte> sealed(data.size() + count * (head + kNumber));  // zeros
  std::byte* at = sealed.data();
  for (std::size_t i = 0; i < count; ++i) {
    const auto size = static_cast<std::uint64_t>(splits[i + 1] - splits[i]);
    if (size == kInvalidLength) throw std::invalid_argument("a payload has the length that marks bad ones");
    if (header.tag) std::memcpy(at, &tags[i], kNumber);
    at += head;
    std::memcpy(at, &size, kNumber);
    at += kNumber;
    if (size > 0) std::memcpy(at, data.data() + splits[i], size);
    at += size;
  }
  return sealed;
}

void check_payload_splits(std::span<const std::int64_t> splits, std::size_t size) {
  if (splits.empty() || splits.front() != 0 || splits.back() != static_cast<std::int64_t>(size) ||
      !std::is_sorted(splits.begin(), splits.end()))
    throw std::invalid_argument("splits must rise from 0 to the number of bytes");
}

}  // namespace monolith
