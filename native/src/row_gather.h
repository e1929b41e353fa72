// Gathering rows: records in another order, out of many blocks, all columns in one call.
//
// Shuffling and batching only decide which record comes next. That is numbers, and cheap; moving the values
// is not. So an order is put together first, over blocks that stay as they were parsed, and each value is
// moved once, from its block to its batch.
//
//     blocks    0: a b c    1: d e        places    (0, 2) (1, 0) (0, 0)   ->   c d a
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "example_parser.h"

namespace monolith {

// A ragged column of a block, over memory that its owner keeps.
struct SourceColumn {
  ColumnType type = ColumnType::kInt64;
  std::span<const std::int64_t> splits;  // where each row begins among the values, then where the last ends
  // Those of the type are set. Strings lie in `bytes`; `inner` says where each begins.
  std::span<const std::int64_t> ints;
  std::span<const float> floats;
  std::span<const std::byte> bytes;
  std::span<const std::int64_t> inner;
  bool one_each = false;  // row i is value i: most columns are so, and are gathered without their splits

  std::size_t rows() const { return splits.size() - 1; }
};

// Checks the splits of a column and finds whether it has one value in each row. Throws std::invalid_argument
// for splits that fall or reach beyond what they split.
void settle_column(SourceColumn& column);

// One row of a block for each place, in order. `column` is the same column of all blocks, of one type;
// `block_of` is empty if there is one block. Places are not checked. The splits of a column that has one
// value in each row stay empty: they are 0, 1, 2, ... for all such columns.
ParsedColumn gather_column(std::span<const SourceColumn* const> column,
                           std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows);

// Rows of a column: the same column of several blocks, and which row of which of them comes next. Not
// checked.
class Places {
 public:
  struct Range {
    std::int64_t begin, end;
  };

  Places(std::span<const SourceColumn* const> column, std::span<const std::int32_t> block_of,
         std::span<const std::int64_t> rows)
      : column_(column), block_of_(block_of), rows_(rows) {}

  std::size_t size() const { return rows_.size(); }
  const SourceColumn& block(std::size_t i) const {
    return *column_[block_of_.empty() ? 0 : static_cast<std::size_t>(block_of_[i])];
  }
  std::size_t row(std::size_t i) const { return static_cast<std::size_t>(rows_[i]); }
  Range values(std::size_t i) const {
    const SourceColumn& column = block(i);
    return {column.splits[row(i)], column.splits[row(i) + 1]};
  }
  bool one_each() const {
    for (const SourceColumn* const column : column_)
      if (!column->one_each) return false;
    return true;
  }

 private:
  const std::span<const SourceColumn* const> column_;
  const std::span<const std::int32_t> block_of_;
  const std::span<const std::int64_t> rows_;
};

}  // namespace monolith
