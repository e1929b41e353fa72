#include "row_pack.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace monolith {
namespace {

const SourceColumn& block_at(std::span<const SourceColumn* const> column,
                             std::span<const std::int32_t> block_of, std::size_t i) {
  return *column[block_of.empty() ? 0 : static_cast<std::size_t>(block_of[i])];
}

}  // namespace

bool add_row_ids(RawIds feature, std::span<const SourceColumn* const> column,
                 std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                 PackedIds& packed) {
  const bool one_each = std::ranges::all_of(column, [](const auto* block) { return block->one_each; });
  const std::size_t first = packed.ids.size(), cell = packed.splits.size();
  if (one_each && feature.kind == RawIds::Kind::kInts) {
    packed.ids.resize(first + rows.size());
    std::int64_t* const ids = packed.ids.data() + first;
    bool fine = true;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t value = block_at(column, block_of, i).ints[static_cast<std::size_t>(rows[i])];
      fine &= feature.id.takes(value);
      ids[i] = feature.id.of(value);
    }
    packed.splits.resize(cell + rows.size());
    std::iota(packed.splits.begin() + static_cast<std::ptrdiff_t>(cell), packed.splits.end(),
              static_cast<std::int64_t>(first) + 1);
    return fine;
  }
  ParsedColumn gathered = gather_column(column, block_of, rows);
  if (one_each) {
    gathered.splits.resize(rows.size() + 1);
    std::iota(gathered.splits.begin(), gathered.splits.end(), std::int64_t{0});
  }
  feature.rows = gathered.splits;
  feature.ints = gathered.ints;
  feature.floats = gathered.floats;
  feature.texts = {std::as_bytes(std::span(gathered.bytes)), gathered.inner, gathered.splits};
  return add_ids(feature, packed);
}

std::int64_t copy_row_numbers(RowNumbers kind, std::span<const SourceColumn* const> column,
                              std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                              std::span<float> out) {
  if (out.size() != rows.size()) throw std::invalid_argument("there must be room for a number of each row");
  bool fine = true;
  std::int64_t missing = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const SourceColumn& block = block_at(column, block_of, i);
    const auto row = static_cast<std::size_t>(rows[i]);
    const auto begin = static_cast<std::size_t>(block.splits[row]);
    const std::int64_t count = block.splits[row + 1] - block.splits[row];
    if (block.type == ColumnType::kBytes || count > 1) return -1;
    const float number = count == 0                         ? std::numeric_limits<float>::quiet_NaN()
                         : block.type == ColumnType::kInt64 ? static_cast<float>(block.ints[begin])
                                                            : block.floats[begin];
    const bool none = std::isnan(number);
    missing += none ? 1 : 0;
    fine &= none || (kind == RowNumbers::kClasses ? number == 0 || number == 1 : std::isfinite(number));
    out[i] = number;
  }
  return fine ? missing : -1;
}

}  // namespace monolith
