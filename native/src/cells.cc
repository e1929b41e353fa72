#include "cells.h"

#include <stdexcept>
#include <string_view>
#include <utility>

#include "hash.h"
#include "texts.h"

namespace monolith {
namespace {

void check_splits(std::span<const std::int64_t> splits, std::size_t size) {
  if (splits.empty()) throw std::invalid_argument("splits must not be empty");
  std::int64_t before = 0;
  for (const std::int64_t split : splits) {
    if (split < before || split > static_cast<std::int64_t>(size))
      throw std::invalid_argument("splits must not fall, nor reach beyond what they split");
    before = split;
  }
}

// Calls `read` with each item and the list; what returns false makes its row a bad one.
template <class T, class Read>
Lists<T> read_cells(const TextColumn& column, std::optional<char> separator, Read&& read) {
  check_splits(column.splits, column.text.size());
  check_splits(column.rows, column.splits.size() - 1);
  const auto* const text = reinterpret_cast<const char*>(column.text.data());
  Lists<T> found;
  found.values.reserve(column.splits.size() - 1);
  found.splits.reserve(column.rows.size());
  found.splits.push_back(0);
  for (std::size_t row = 0; row + 1 < column.rows.size(); ++row) {
    bool fine = true;
    for (std::int64_t at = column.rows[row]; at < column.rows[row + 1] && fine; ++at) {
      const std::string_view cell(text + column.splits[at],
                                  static_cast<std::size_t>(column.splits[at + 1] - column.splits[at]));
      each_value(cell, separator, [&](std::string_view item) { return fine = read(item, found.values); });
    }
    if (!fine) {
      found.values.resize(static_cast<std::size_t>(found.splits.back()));
      found.bad.push_back(static_cast<std::int64_t>(row));
    }
    found.splits.push_back(static_cast<std::int64_t>(found.values.size()));
  }
  return found;
}

}  // namespace

Lists<std::int64_t> hash_cells(const TextColumn& column, std::optional<char> separator, IdKind kind) {
  return read_cells<std::int64_t>(column, separator, [&](std::string_view item, auto& values) {
    values.push_back(kind(hash_bytes(std::as_bytes(std::span(item)))));
    return true;
  });
}

Lists<std::int64_t> read_whole_cells(const TextColumn& column, std::optional<char> separator) {
  return read_cells<std::int64_t>(column, separator, [](std::string_view item, auto& values) {
    return read_whole(strip(item), values.emplace_back()).empty();
  });
}

Lists<float> read_number_cells(const TextColumn& column, std::optional<char> separator) {
  return read_cells<float>(column, separator, [](std::string_view item, auto& values) {
    return read_number(strip(item), values.emplace_back()).empty();
  });
}

Lists<std::int64_t> cross_cells(std::span<const IdColumn> columns, std::size_t most, IdKind kind) {
  if (columns.empty()) throw std::invalid_argument("a cross needs columns");
  for (const IdColumn& column : columns) {
    check_splits(column.splits, column.ids.size());
    if (column.splits.size() != columns[0].splits.size())
      throw std::invalid_argument("columns of a cross must have the same number of rows");
  }
  Lists<std::int64_t> found;
  found.splits.push_back(0);
  std::vector<std::uint64_t> ways, longer;  // hashes of the columns so far
  for (std::size_t row = 0; row + 1 < columns[0].splits.size(); ++row) {
    ways.assign(1, mix(static_cast<std::int64_t>(columns.size())));
    for (const IdColumn& column : columns) {
      const auto ids =
          column.ids.subspan(static_cast<std::size_t>(column.splits[row]),
                             static_cast<std::size_t>(column.splits[row + 1] - column.splits[row]));
      if (ids.size() > most || ways.size() * ids.size() > most) {
        found.bad.push_back(static_cast<std::int64_t>(row));
        ways.clear();
        break;
      }
      longer.clear();
      for (const std::uint64_t way : ways)
        for (const std::int64_t id : ids)
          longer.push_back(mix(static_cast<std::int64_t>(way ^ static_cast<std::uint64_t>(id))));
      std::swap(ways, longer);
    }
    for (const std::uint64_t way : ways) found.values.push_back(kind(way));
    found.splits.push_back(static_cast<std::int64_t>(found.values.size()));
  }
  return found;
}

}  // namespace monolith
