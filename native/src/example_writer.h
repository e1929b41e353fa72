// Example writer: columns straight to payloads, with no object per record.
//
// A record without values in a column has nothing of it in its message, so a column that is empty
// throughout is not written at all. Columns that Monolith's messages have fields for (labels, weight,
// LineId) go there; in an ExampleBatch, which has no such fields, they become lists of the names
// Monolith gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "example_columns.h"
#include "workers.h"

namespace monolith {

// One column, borrowed; see ParsedColumn.
struct ColumnView {
  std::string name;
  ColumnType type = ColumnType::kInt64;
  bool shared = false;  // one row, for every record
  bool ids = false;     // integers: write as ids of version 2, where the message tells the two apart
  std::span<const std::int64_t> splits;
  std::span<const std::int64_t> ints;
  std::span<const float> floats;
  std::span<const std::uint8_t> bytes;
  std::span<const std::int64_t> inner;
};

struct EncodedExamples {
  std::vector<std::byte> data;
  std::vector<std::int64_t> splits;  // where each payload begins, then the end
};

// One payload per record, or one for all of an ExampleBatch.
// Throws std::invalid_argument for splits that make no rows, for a column of another type than the
// message's field for it, and for a line_id column that LineId has no field for.
EncodedExamples encode_examples(ExampleKind kind, std::size_t records, std::span<const ColumnView> columns,
                                Workers* workers = nullptr);

}  // namespace monolith
