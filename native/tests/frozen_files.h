// Frozen tables in memory, for tests.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "checksum.h"
#include "frozen_table.h"
#include "frozen_writer.h"

namespace monolith::check {

using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;
using Segments = std::vector<FrozenSegment>;

// A file in memory, to the byte: a read beyond its end is one that a sanitizer sees.
struct FrozenFile {
  std::vector<std::byte> bytes;

  std::shared_ptr<FrozenTable> open() const {
    const std::size_t size = bytes.size();
    auto* const memory = static_cast<std::byte*>(::operator new(size, std::align_val_t{64}));
    if (size > 0) std::memcpy(memory, bytes.data(), size);
    std::shared_ptr<const void> owner(
        memory, [](const void* p) { ::operator delete(const_cast<void*>(p), std::align_val_t{64}); });
    return std::make_shared<FrozenTable>(std::span<const std::byte>(memory, size), owner, "a file");
  }
  FrozenTrailer trailer() const {
    FrozenTrailer found;
    std::memcpy(&found, bytes.data() + bytes.size() - sizeof found, sizeof found);
    return found;
  }
  // With a checksum that fits: as somebody would write it who means harm.
  void put(FrozenTrailer trailer) {
    trailer.crc = crc32c(std::as_bytes(std::span(&trailer, 1)).first(offsetof(FrozenTrailer, crc)));
    std::memcpy(bytes.data() + bytes.size() - sizeof trailer, &trailer, sizeof trailer);
  }
};

inline FrozenFile write(const Segments& segments, const Ids& ids, const Floats& values,
                        std::size_t chunk = 100) {
  FrozenWriter writer(segments, "item", ids.size());
  FrozenFile file;
  const auto append = [&](std::span<const std::byte> bytes) {
    file.bytes.insert(file.bytes.end(), bytes.begin(), bytes.end());
  };
  const FrozenHead head = writer.begin();
  append(std::as_bytes(std::span(&head, 1)));
  for (std::size_t at = 0; at < ids.size(); at += chunk) {
    const std::size_t count = std::min(chunk, ids.size() - at);
    std::vector<std::byte> rows(count * writer.row_bytes());
    writer.add(std::span(ids).subspan(at, count),
               std::span(values).subspan(at * writer.dim(), count * writer.dim()), rows);
    append(rows);
  }
  append(writer.finish());
  CHECK_EQUAL(writer.bytes(), file.bytes.size());
  CHECK_EQUAL(writer.crc(), crc32c(file.bytes));
  return file;
}

}  // namespace monolith::check
