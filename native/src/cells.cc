#include "cells.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "hash.h"
#include "texts.h"

namespace monolith {
namespace {

void check_splits(std::span<const std::int64_t> splits, std::size_t size) {
  if (splits.empty()) throw std::invalid_argument("splits must not be empty");
  bool falls = splits.front() < 0 || splits.back() > static_cast<std::int64_t>(size);
  for (std::size_t i = 1; i < splits.size(); ++i) falls |= splits[i] < splits[i - 1];
  if (falls) throw std::invalid_argument("splits must not fall, nor reach beyond what they split");
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

namespace {

// Adds the ids of texts that are one value each, with no list in them; false where one is empty, or where
// rows leave some out, and nothing is added.
bool add_hashes(const RawIds& feature, PackedIds& packed) {
  const TextColumn& column = feature.texts;
  const std::size_t texts = column.splits.size() - 1, first = packed.ids.size(), cell = packed.splits.size();
  if (column.rows.front() != 0 || column.rows.back() != static_cast<std::int64_t>(texts)) return false;
  packed.ids.resize(first + texts);
  std::int64_t* const ids = packed.ids.data() + first;
  const std::byte* const text = column.text.data();
  bool empty = false;
  for (std::size_t i = 0; i < texts; ++i) {
    const auto size = static_cast<std::size_t>(column.splits[i + 1] - column.splits[i]);
    empty |= size == 0;
    ids[i] = feature.id(hash_bytes({text + column.splits[i], size}));
  }
  if (empty) {
    packed.ids.resize(first);
    return false;
  }
  packed.splits.resize(cell + column.rows.size() - 1);
  for (std::size_t row = 1; row < column.rows.size(); ++row)
    packed.splits[cell + row - 1] = static_cast<std::int64_t>(first) + column.rows[row];
  return true;
}

// Adds the ids of one feature; false where something cannot be read.
bool add_ids(const RawIds& feature, PackedIds& packed) {
  using Kind = RawIds::Kind;
  if (feature.kind == Kind::kHashed || feature.kind == Kind::kWholeTexts) {
    const TextColumn& column = feature.texts;
    check_splits(column.splits, column.text.size());
    check_splits(column.rows, column.splits.size() - 1);
    if (feature.kind == Kind::kHashed && !feature.separator && add_hashes(feature, packed)) return true;
    const auto* const text = reinterpret_cast<const char*>(column.text.data());
    bool fine = true;
    for (std::size_t row = 0; row + 1 < column.rows.size() && fine; ++row) {
      for (std::int64_t at = column.rows[row]; at < column.rows[row + 1]; ++at) {
        const std::string_view cell(text + column.splits[at],
                                    static_cast<std::size_t>(column.splits[at + 1] - column.splits[at]));
        each_value(cell, feature.separator, [&](std::string_view item) {
          if (feature.kind == Kind::kHashed) {
            packed.ids.push_back(feature.id(hash_bytes(std::as_bytes(std::span(item)))));
            return true;
          }
          std::int64_t value = 0;
          fine = read_whole(strip(item), value).empty() && feature.id.takes(value);
          packed.ids.push_back(feature.id.of(value));
          return fine;
        });
      }
      packed.splits.push_back(static_cast<std::int64_t>(packed.ids.size()));
    }
    return fine;
  }
  const bool whole = feature.kind != Kind::kFloatBuckets;
  const std::size_t count = whole ? feature.ints.size() : feature.floats.size();
  check_splits(feature.rows, count);
  if (feature.rows.front() != 0 || feature.rows.back() != static_cast<std::int64_t>(count))
    throw std::invalid_argument("splits must begin with 0 and end with the number of values");
  const auto before = static_cast<std::int64_t>(packed.ids.size());
  // How many boundaries are not above a value. A few are counted, many at once; many are halved.
  const auto bucket = [&](double value) {
    if (feature.boundaries.size() > 64) {
      const auto at = std::upper_bound(feature.boundaries.begin(), feature.boundaries.end(), value);
      return feature.id.of(at - feature.boundaries.begin());
    }
    std::int64_t count = 0;
    for (const double boundary : feature.boundaries) count += boundary <= value ? 1 : 0;
    return feature.id.of(count);
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (feature.kind == Kind::kInts) {
      if (!feature.id.takes(feature.ints[i])) return false;
      packed.ids.push_back(feature.id.of(feature.ints[i]));
    } else if (whole) {
      packed.ids.push_back(bucket(static_cast<double>(feature.ints[i])));
    } else {
      if (!std::isfinite(feature.floats[i])) return false;
      packed.ids.push_back(bucket(feature.floats[i]));
    }
  }
  for (std::size_t row = 1; row < feature.rows.size(); ++row)
    packed.splits.push_back(before + feature.rows[row]);
  return true;
}

}  // namespace

PackedIds pack_ids(std::span<const RawIds> features) {
  PackedIds packed;
  std::size_t ids = 0, cells = 1;
  for (const RawIds& feature : features) {
    const bool texts = !feature.texts.rows.empty();
    ids += texts ? feature.texts.splits.size() : feature.ints.size() + feature.floats.size();
    cells += texts ? feature.texts.rows.size() : feature.rows.size();
  }
  packed.ids.reserve(ids);
  packed.splits.reserve(cells);
  packed.splits.push_back(0);
  for (const RawIds& feature : features)
    if (!add_ids(feature, packed)) {
      packed.fine = false;
      break;
    }
  return packed;
}

bool pack_numbers(std::span<const RawNumbers> columns, std::size_t rows, std::span<float> out) {
  if (out.size() != columns.size() * rows) throw std::invalid_argument("there must be room for all numbers");
  float* to = out.data();
  for (const RawNumbers& column : columns) {
    if (column.ints.size() + column.floats.size() != rows || column.rows.size() != rows + 1) return false;
    bool fine = true;
    for (std::size_t row = 0; row <= rows; ++row) fine &= column.rows[row] == static_cast<std::int64_t>(row);
    if (!column.ints.empty())
      for (std::size_t row = 0; row < rows; ++row) to[row] = static_cast<float>(column.ints[row]);
    else
      for (std::size_t row = 0; row < rows; ++row) {
        fine &= std::isfinite(column.floats[row]);
        to[row] = column.floats[row];
      }
    if (!fine) return false;
    to += rows;
  }
  return true;
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
