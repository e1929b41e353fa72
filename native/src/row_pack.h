// Packing rows where they lie: the ids and numbers of a batch, straight from the blocks that have its rows.
//
// The same as gathering the columns and packing those, without a column of the batch in between.
#pragma once

#include <cstdint>
#include <span>

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

// Copies one number of each row to `out`, NaN where a row has none. Returns how many have none; -1 if a row
// has several numbers, or one that may not be, and `out` means nothing then.
std::int64_t copy_row_numbers(RowNumbers kind, std::span<const SourceColumn* const> column,
                              std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                              std::span<float> out);

}  // namespace monolith
