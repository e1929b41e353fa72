#include "row_gather.h"

#include <cstring>

#include "cells.h"

namespace monolith {
namespace {

std::size_t values_of(const SourceColumn& column) {
  switch (column.type) {
    case ColumnType::kInt64:
      return column.ints.size();
    case ColumnType::kFloat:
      return column.floats.size();
    default:
      return column.inner.size() - 1;
  }
}

template <class T, std::span<const T> SourceColumn::* Values>
void gather_numbers(const Places& places, bool one_each, std::vector<T>& out, std::size_t total) {
  if (one_each) {
    out.resize(places.size());
    for (std::size_t i = 0; i < places.size(); ++i) out[i] = (places.block(i).*Values)[places.row(i)];
    return;
  }
  out.reserve(total);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto [begin, end] = places.values(i);
    const T* const values = (places.block(i).*Values).data();
    out.insert(out.end(), values + begin, values + end);
  }
}

void gather_texts(const Places& places, ParsedColumn& out, std::size_t total) {
  // Two passes: the sizes first, so that the bytes are allocated once.
  out.inner.reserve(total + 1);
  out.inner.push_back(0);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto [begin, end] = places.values(i);
    const std::int64_t* const inner = places.block(i).inner.data();
    for (std::int64_t at = begin; at < end; ++at)
      out.inner.push_back(out.inner.back() + inner[at + 1] - inner[at]);
  }
  out.bytes.resize(static_cast<std::size_t>(out.inner.back()));
  std::uint8_t* to = out.bytes.data();
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto [begin, end] = places.values(i);
    const SourceColumn& block = places.block(i);
    // The strings of a row lie one after the other.
    const auto size = static_cast<std::size_t>(block.inner[static_cast<std::size_t>(end)] -
                                               block.inner[static_cast<std::size_t>(begin)]);
    if (size > 0) std::memcpy(to, block.bytes.data() + block.inner[static_cast<std::size_t>(begin)], size);
    to += size;
  }
}

}  // namespace

void settle_column(SourceColumn& column) {
  if (column.type == ColumnType::kBytes) check_splits(column.inner, column.bytes.size());
  check_splits(column.splits, values_of(column));
  bool odd = false;
  for (std::size_t i = 0; i < column.splits.size(); ++i)
    odd |= column.splits[i] != static_cast<std::int64_t>(i);
  column.one_each = !odd;
}

ParsedColumn gather_column(std::span<const SourceColumn* const> column,
                           std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows) {
  const Places places(column, block_of, rows);
  const bool one_each = places.one_each();
  ParsedColumn out;
  out.type = column.empty() ? ColumnType::kInt64 : column[0]->type;
  if (!one_each) {
    out.splits.resize(rows.size() + 1);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto [begin, end] = places.values(i);
      out.splits[i + 1] = out.splits[i] + end - begin;
    }
  }
  const std::size_t total = one_each ? rows.size() : static_cast<std::size_t>(out.splits.back());
  switch (out.type) {
    case ColumnType::kInt64:
      gather_numbers<std::int64_t, &SourceColumn::ints>(places, one_each, out.ints, total);
      break;
    case ColumnType::kFloat:
      gather_numbers<float, &SourceColumn::floats>(places, one_each, out.floats, total);
      break;
    case ColumnType::kBytes:
      gather_texts(places, out, total);
      break;
  }
  return out;
}

}  // namespace monolith
