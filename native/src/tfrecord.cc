#include "tfrecord.h"

#include <bit>
#include <cstring>

#include "checksum.h"

namespace monolith {
namespace {

static_assert(std::endian::native == std::endian::little, "lengths and checksums are stored little-endian");

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

Record truncated(std::size_t have, std::uint64_t need) {
  return {{},
          "truncated record: " + std::to_string(have) + " bytes left of a record of " + std::to_string(need),
          true};
}

}  // namespace

void seal_record(std::span<std::byte> record) {
  const std::uint64_t length = record.size() - kRecordHeader - kRecordFooter;
  std::memcpy(record.data(), &length, sizeof length);
  const std::uint32_t length_crc = masked_crc32c(record.first(sizeof length));
  std::memcpy(record.data() + sizeof length, &length_crc, sizeof length_crc);
  const std::uint32_t crc = masked_crc32c(record.subspan(kRecordHeader, length));
  std::memcpy(record.data() + kRecordHeader + length, &crc, sizeof crc);
}

Record first_record(std::span<const std::byte> buffer) {
  if (buffer.size() < kRecordHeader) return truncated(buffer.size(), record_size(0));
  const auto length = read<std::uint64_t>(buffer.data());
  if (masked_crc32c(buffer.first(sizeof length)) != read<std::uint32_t>(buffer.data() + sizeof length))
    return {{}, "bad length checksum", false};
  const std::size_t rest = buffer.size() - kRecordHeader;
  if (rest < kRecordFooter || length > rest - kRecordFooter)
    return truncated(buffer.size(), record_size(length));
  const auto payload = buffer.subspan(kRecordHeader, length);
  if (masked_crc32c(payload) != read<std::uint32_t>(payload.data() + length))
    return {{}, "bad data checksum", false};
  return {payload, {}, false};
}

SplitStream split_records(std::span<const std::byte> buffer) {
  SplitStream split;
  while (split.consumed < buffer.size()) {
    Record record = first_record(buffer.subspan(split.consumed));
    if (!record.failure.empty()) {
      split.failure = std::move(record.failure);
      split.truncated = record.truncated;
      break;
    }
    split.starts.push_back(static_cast<std::int64_t>(split.consumed));
    split.offsets.push_back(static_cast<std::int64_t>(split.consumed + kRecordHeader));
    split.lengths.push_back(static_cast<std::int64_t>(record.payload.size()));
    split.consumed += record_size(record.payload.size());
  }
  return split;
}

std::vector<std::byte> seal_records(std::span<const std::byte> data, std::span<const std::int64_t> splits) {
  check_payload_splits(splits, data.size());
  std::vector<std::byte> sealed(data.size() + (splits.size() - 1) * record_size(0));
  std::size_t at = 0;
  for (std::size_t i = 0; i + 1 < splits.size(); ++i) {
    const auto size = static_cast<std::size_t>(splits[i + 1] - splits[i]);
    const auto record = std::span(sealed).subspan(at, record_size(size));
    if (size > 0) std::memcpy(record.data() + kRecordHeader, data.data() + splits[i], size);
    seal_record(record);
    at += record.size();
  }
  return sealed;
}

}  // namespace monolith
