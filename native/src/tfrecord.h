// TFRecord framing: a length, its checksum, the payload, its checksum.
//
// The checksum on the length is what lets a reader tell a damaged file from a
// long record before it trusts the length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "frames.h"

namespace monolith {

inline constexpr std::size_t kRecordHeader = 12;  // before the payload
inline constexpr std::size_t kRecordFooter = 4;   // after it

inline constexpr std::size_t record_size(std::size_t payload) {
  return kRecordHeader + payload + kRecordFooter;
}

// Writes header and footer around a payload that already lies in its place in `record`.
void seal_record(std::span<std::byte> record);

// One record at the beginning of a buffer, or why there is none.
struct Record {
  std::span<const std::byte> payload;
  std::string failure;     // empty when `payload` is good
  bool truncated = false;  // the buffer ends inside the record: more bytes may mend it
};

Record first_record(std::span<const std::byte> buffer);

// The payloads of the whole records a buffer begins with.
SplitStream split_records(std::span<const std::byte> buffer);

// Payload i is data[splits[i]:splits[i + 1]]; all of them as records.
std::vector<std::byte> seal_records(std::span<const std::byte> data, std::span<const std::int64_t> splits);

}  // namespace monolith
