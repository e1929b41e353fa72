// A row with its ID and event time, as it moves between the tiers of a table: 16 bytes, then the row as the
// table stores it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace monolith {

struct RecordHead {
  std::uint64_t hash;
  std::uint32_t time;
  std::uint32_t epoch;  // between tiers a RowChange; in files see TieredTable
};
static_assert(sizeof(RecordHead) == 16);

// Whether a row changed, as far as snapshots have to know.
enum RowChange : std::uint32_t {
  kUnchanged = 0,              // not since the snapshot before the open one, or before the next one
  kChangedBeforeSnapshot = 1,  // before the open snapshot, which lists it
  kChanged = 2,                // since
};

inline RecordHead head_at(const std::byte* record) {
  RecordHead head;
  std::memcpy(&head, record, sizeof(head));
  return head;
}

inline std::uint64_t hash_at(const std::byte* record) {
  std::uint64_t hash;
  std::memcpy(&hash, record, sizeof(hash));
  return hash;
}

}  // namespace monolith
