// Packing rows where they lie: the ids and numbers of a batch, straight from the blocks that have its rows.
//
// The same as gathering the columns and packing those, without a column of the batch in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cells.h"
#include "row_gather.h"

namespace monolith {

// Adds the ids of one feature; `column` and the rows are as `gather_column` takes them, and the values of
// `feature` are not read. False if something cannot be read, and the rest means nothing then.
bool add_row_ids(RawIds feature, std::span<const SourceColumn* const> column,
                 std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                 PackedIds& packed);

enum class RowNumbers : std::uint8_t {
  kAny,      // any finite number, or none
  kClasses,  // 0 or 1, or none
};

struct NumberPlan {
  RowNumbers kind = RowNumbers::kAny;
  std::size_t width = 1;  // numbers of a row
  // Whether texts are read as numbers, with this between those of a list.
  bool reads_texts = false;
  std::optional<char> separator = std::nullopt;
};

// Copies the numbers of each row to `out`, NaN where a row has none at all. Returns how many rows lack a
// number; -1 if a row has another count of them, or one that may not be, and `out` means nothing then.
std::int64_t copy_row_numbers(const NumberPlan& plan, std::span<const SourceColumn* const> column,
                              std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                              std::span<float> out);

// How the times of events are read.
struct TimePlan {
  std::int64_t per_second = 0;  // what numbers count; 0 tells it by the size of each
  bool iso_texts = false;       // whether texts must be in ISO 8601
  std::int64_t oldest = 0;      // the least number of seconds that a larger unit may have
  std::int64_t latest = 0;      // the last second that may be
};

struct RowTimes {
  enum Form : std::uint32_t { kMilliseconds = 1, kMicroseconds = 2, kNanoseconds = 4, kIso = 8 };

  std::vector<std::int64_t> seconds;
  std::vector<std::int64_t> splits;  // of rows among them; empty if each row has one
  std::uint32_t forms = 0;           // those that were recognised
};

// The Unix seconds of each row, at most one. None if a time is odd: no whole number of the unit, no date or
// time of day in UTC as in 2024-05-01 or 2024-05-01T10:00:00Z, out of range, a float, or one of several.
std::optional<RowTimes> read_row_times(const TimePlan& plan, std::span<const SourceColumn* const> column,
                                       std::span<const std::int32_t> block_of,
                                       std::span<const std::int64_t> rows);

// What the rows of one feature are made of: a column of IDs, and those next to it.
struct RowColumn {
  enum class Kind : std::uint8_t {
    kIds,      // as `ids` says
    kWeights,  // a number for each ID of the column before, 1 for all IDs of a row that has none
    kSeconds,  // times, as Unix seconds
    kGaps,     // times of the IDs before: the bucket of the seconds from each to the event
  };

  Kind kind = Kind::kIds;
  // How IDs are read, without values. Of other kinds the separator counts, and of gaps how buckets become
  // IDs.
  RawIds ids;
  TimePlan times;
};

// A feature of several columns, or one of which a row keeps some values. Each column but those of weights has
// a cell for each row.
struct RowFeature {
  std::vector<RowColumn> columns;
  std::size_t most = 0;     // values that a row keeps of each column; 0 keeps all
  bool keeps_last = false;  // which of them
  bool steps = false;       // whether each step of a row must have a value in each column
};

struct WeightedIds {
  PackedIds ids;
  // Of all IDs up to those of the last feature with weights; all others have 1. None without such a feature.
  std::optional<std::vector<float>> weights;
};

// Adds the cells of a feature, with the forms of times that each column has. False if something cannot be
// read, or the rows of its columns have different lengths, and nothing is added then.
bool add_row_feature(const RowFeature& feature, std::span<const std::vector<const SourceColumn*>> columns,
                     std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                     const RowTimes* event_times, WeightedIds& packed, std::vector<std::uint32_t>& forms);

}  // namespace monolith
