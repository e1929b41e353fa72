// Entry dumps: rows as columns on our side, as EntryDump messages on disk.
//
// An EntryDump file is upstream's table dump: TFRecords, each one row (id,
// values, optimizer state, time). The codec goes straight between those bytes
// and columns, with no message object per row. What is written is byte for byte
// what upstream writes; what is read may come from anyone, so a bad record is
// an answer (where, why), not a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "optimizer_kind.h"

namespace monolith {

struct DumpSegment {
  OptimizerKind kind;
  std::size_t dim;
};

// n rows, borrowed. State is laid out as optimizer_kind.h says.
struct EntryColumns {
  std::span<const std::int64_t> ids;  // n, or empty: the messages carry no id
  std::span<const std::int64_t> event_times;
  std::span<const float> values;  // n rows of dim()
  std::span<const float> state;   // n rows of state_dim()
};

struct DumpFailure {
  std::size_t offset;  // of the record, from the beginning of the buffer
  std::string reason;
  bool truncated;  // the buffer ends inside a record that is good so far
};

struct DecodedEntries {
  std::size_t dim = 0;        // floats per row of `values`
  std::size_t state_dim = 0;  // and of `state`
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> event_times;
  std::vector<float> values;
  std::vector<float> state;
  std::vector<std::uint8_t> state_missing;  // 1: a segment's state was not in the record and reads as zeros
  std::size_t consumed = 0;                 // bytes of the records above; a failure begins there
  std::optional<DumpFailure> failure;
};

// Immutable, so safe to share between threads.
class EntryDumpCodec {
 public:
  // Throws std::invalid_argument without segments or for a segment without values.
  explicit EntryDumpCodec(std::vector<DumpSegment> segments);

  std::size_t dim() const { return dim_; }
  std::size_t state_dim() const { return state_dim_; }

  // The bytes each message takes, without framing.
  // Throws std::invalid_argument for columns of different lengths; so do the functions below.
  std::vector<std::size_t> message_sizes(const EntryColumns& rows) const;

  // Writes one message per row to where `outs` says, each of the size message_sizes() gave.
  void encode_messages(const EntryColumns& rows, std::span<const std::span<std::byte>> outs) const;

  // The bytes all rows take as TFRecords, and those bytes.
  std::size_t encoded_size(const EntryColumns& rows) const;
  void encode(const EntryColumns& rows, std::span<std::byte> out) const;

  // Reads records until the end of the buffer, the first bad one, or `limit` of them.
  DecodedEntries decode(std::span<const std::byte> buffer, std::size_t limit = SIZE_MAX) const;

 private:
  void check(const EntryColumns& rows) const;
  std::size_t optimizer_size(const float* state) const;
  std::size_t message_size(const EntryColumns& rows, std::size_t row) const;
  std::byte* write_message(const EntryColumns& rows, std::size_t row, std::byte* at) const;
  void reserve(DecodedEntries& entries, std::size_t rows) const;
  void read_message(std::span<const std::byte> message, DecodedEntries& to) const;

  std::vector<DumpSegment> segments_;
  std::size_t dim_ = 0;
  std::size_t state_dim_ = 0;
};

}  // namespace monolith
