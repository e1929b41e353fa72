// Frames: Monolith's own stream of records, and what splitting any stream of records yields.
//
// A frame is a header, a length in eight bytes, and the payload. There is no checksum. What the header
// is, the stream does not say: its writer has to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace monolith {

// The whole records that a buffer begins with.
struct SplitStream {
  std::vector<std::int64_t> starts;   // where each record begins
  std::vector<std::int64_t> offsets;  // and its payload
  std::vector<std::int64_t> lengths;  // of the payload
  std::vector<std::int64_t> headers;  // frames with a tag: that number, bit for bit; otherwise empty
  std::size_t consumed = 0;           // bytes of the records above; a failure begins there
  std::string failure;                // why splitting stopped before the end; empty where it did not
  bool truncated = false;             // the buffer ends inside a record: more bytes may mend it
};

// What stands before the length, in this order.
struct FrameHeader {
  bool tag = false;  // one number: the payload's kind in the low byte, its source above; then nothing else
  bool kafka_dump_prefix = false;  // a number: 0 and one more, or the size of the sort id
  bool sort_id = false;            // its size, unless the prefix was it, and so many bytes
  bool kafka_dump = false;         // a number
};

SplitStream split_frames(std::span<const std::byte> buffer, const FrameHeader& header);

// Payload i is data[splits[i]:splits[i + 1]]; all of them as frames. `tags` has one for each if the header
// has a tag, and is empty otherwise; of the rest every number is 0 and every sort id empty.
std::vector<std::byte> seal_frames(std::span<const std::byte> data, std::span<const std::int64_t> splits,
                                   const FrameHeader& header, std::span<const std::int64_t> tags);

// Throws std::invalid_argument unless splits rise from 0 to `size`.
void check_payload_splits(std::span<const std::int64_t> splits, std::size_t size);

}  // namespace monolith
