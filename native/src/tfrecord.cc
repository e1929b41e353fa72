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

}  // namespace monolith
