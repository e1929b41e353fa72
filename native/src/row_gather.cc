#include "row_gather.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "cells.h"
#include "fid.h"
#include "hash.h"
#include "texts.h"

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

struct Range {
  std::int64_t begin, end;
};

// The places of a gather: which column, and which of its rows.
class Places {
 public:
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

// Whether a text is a whole number that 64 bits hold for certain: up to 18 digits, a sign among them.
bool is_certainly_whole(std::string_view text) {
  if (text.empty() || text.size() > 18 || text == "-") return false;
  const std::string_view digits = text.substr(text.front() == '-' ? 1 : 0);
  return std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
}

std::uint64_t hash_text(const SourceColumn& block, std::size_t at, bool times) {
  const auto begin = static_cast<std::size_t>(block.inner[at]),
             end = static_cast<std::size_t>(block.inner[at + 1]);
  const auto text = block.bytes.subspan(begin, end - begin);
  if (times) {
    const std::string_view read(reinterpret_cast<const char*>(text.data()), text.size());
    std::int64_t whole = 0;
    if (is_certainly_whole(read) && read_whole(read, whole).empty()) return static_cast<std::uint64_t>(whole);
  }
  return hash_bytes(text);
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

void hash_column(std::span<const SourceColumn* const> column, std::span<const std::int32_t> block_of,
                 std::span<const std::int64_t> rows, bool times, std::span<std::uint64_t> totals) {
  const Places places(column, block_of, rows);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const SourceColumn& block = places.block(i);
    const auto [begin, end] = places.values(i);
    std::uint64_t sum = 0;
    for (std::int64_t at = begin; at < end; ++at) {
      const auto value = static_cast<std::size_t>(at);
      const std::uint64_t hash =
          block.type == ColumnType::kInt64   ? static_cast<std::uint64_t>(block.ints[value])
          : block.type == ColumnType::kFloat ? std::bit_cast<std::uint32_t>(block.floats[value])
                                             : hash_text(block, value, times);
      sum += mix(hash + mix(static_cast<std::uint64_t>(at - begin)));
    }
    totals[i] = mix(totals[i] ^ mix(sum + static_cast<std::uint64_t>(end - begin)));
  }
}

}  // namespace monolith
