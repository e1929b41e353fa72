// Example parser: payloads straight to columns, with no object per record.
//
// What is read may come from anyone. A payload that is no message of its kind, or that has a column in
// another type than the records before it, is reported and left out; the other records are as if it had
// never been there. The outcome does not depend on how many threads there are.
//
// What becomes of a message:
// - Ids of version 1 become ids of version 2; doubles become floats; lists of lists lie end to end.
// - Of a feature that comes twice the last one counts, as of a key in protobuf's maps.
// - The fields of LineId become the columns line_id.<field>, labels `label`, and so on, whether they
//   stand in fields of their own or in features of the names Monolith gives them.
// - Instance: the ids of slot n become column fc_slot_<n>.
// - Raw features, and Instance's dense, label_tag and next_fid, are skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "example_columns.h"
#include "workers.h"

namespace monolith {

struct ParsedColumn {
  std::string name;
  ColumnType type = ColumnType::kInt64;
  bool shared = false;               // one row, for every record
  std::vector<std::int64_t> splits;  // where each row begins among the values, then their number
  // Those of the type are filled. Strings lie end to end in `bytes`; `inner` are their splits.
  std::vector<std::int64_t> ints;
  std::vector<float> floats;
  std::vector<std::uint8_t> bytes;
  std::vector<std::int64_t> inner;

  // For parsers that add one row after the other: a column without rows; the end of a row whose values were
  // added; and the values of a row that is not closed taken back.
  static ParsedColumn without_rows(ColumnType type);
  void close_row();
  void drop_row();
};

struct BadPayload {
  std::size_t index;
  std::string reason;
};

struct ParsedExamples {
  std::size_t records = 0;
  std::vector<ParsedColumn> columns;  // by name
  std::vector<BadPayload> bad;        // by index
};

using Payload = std::span<const std::byte>;

// Immutable, so safe to share between threads.
class ExampleParser {
 public:
  // `wanted` are the columns to read, or none for all. What is not wanted is checked as far as finding
  // the next field takes, and not copied. Payloads of `task_bytes` in all are one thread's task.
  explicit ExampleParser(ExampleKind kind, std::optional<std::vector<std::string>> wanted = std::nullopt,
                         std::shared_ptr<Workers> workers = nullptr, std::size_t task_bytes = 512 << 10);

  ExampleKind kind() const { return kind_; }

  // One record per payload, bad ones left out. Not for ExampleBatch.
  // Throws std::length_error where columns times records are more than anyone can mean.
  ParsedExamples parse(std::span<const Payload> payloads) const;

  // ExampleBatch: one answer per payload, each with columns and types of its own. A bad payload's answer
  // has no records, and says why under index 0.
  std::vector<ParsedExamples> parse_batches(std::span<const Payload> payloads) const;

 private:
  const ExampleKind kind_;
  const std::optional<std::unordered_set<std::string>> wanted_;
  const std::shared_ptr<Workers> workers_;
  const std::size_t task_bytes_;
};

}  // namespace monolith
