#include "cells.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "hash.h"
#include "texts.h"

namespace monolith {

void check_splits(std::span<const std::int64_t> splits, std::size_t size) {
  if (splits.empty()) throw std::invalid_argument("splits must not be empty");
  bool falls = splits.front() < 0 || splits.back() > static_cast<std::int64_t>(size);
  for (std::size_t i = 1; i < splits.size(); ++i) falls |= splits[i] < splits[i - 1];
  if (falls) throw std::invalid_argument("splits must not fall, nor reach beyond what they split");
}

namespace {

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

// Whether each row is one text that is not empty, with splits as they should be.
bool is_one_each(const TextColumn& column) {
  if (column.rows.size() != column.splits.size() || column.splits.empty()) return false;
  const std::size_t texts = column.splits.size() - 1;
  bool odd =
      column.splits.front() < 0 || column.splits[texts] > static_cast<std::int64_t>(column.text.size());
  odd |= column.rows[texts] != static_cast<std::int64_t>(texts);
  for (std::size_t i = 0; i < texts; ++i)
    odd |= (column.splits[i + 1] <= column.splits[i]) | (column.rows[i] != static_cast<std::int64_t>(i));
  return !odd;
}

// The hash of a text of 9 to 16 bytes, as `hash_bytes` has it, without a branch.
std::uint64_t hash_two_words(const std::byte* text, std::size_t size) {
  std::uint64_t first, last;
  std::memcpy(&first, text, 8);
  std::memcpy(&last, text + size - 8, 8);
  const std::uint64_t hash = mix(static_cast<std::int64_t>(kLengthHashes[size] ^ first));
  return mix(static_cast<std::int64_t>(hash ^ last >> 8 * (16 - size)));
}

// Adds the ids of a column that is one text in each row. Four texts at a time, since a multiplication
// waits for the one before it only within a text.
void add_hashes(const TextColumn& column, IdKind kind, PackedIds& packed) {
  constexpr std::size_t kAtOnce = 4;
  const std::size_t texts = column.splits.size() - 1, first = packed.ids.size(), cell = packed.splits.size();
  packed.ids.resize(first + texts);
  packed.splits.resize(cell + texts);
  std::int64_t* const ids = packed.ids.data() + first;
  const std::int64_t* const splits = column.splits.data();
  const std::byte* const text = column.text.data();
  const auto size = [&](std::size_t i) { return static_cast<std::size_t>(splits[i + 1] - splits[i]); };
  const auto hash_one = [&](std::size_t i) { ids[i] = kind(hash_bytes({text + splits[i], size(i)})); };
  std::size_t i = 0;
  for (; i + kAtOnce <= texts; i += kAtOnce) {
    bool two_words = true;
    for (std::size_t k = 0; k < kAtOnce; ++k) two_words &= size(i + k) - 9 < 8;
    if (two_words)
      for (std::size_t k = 0; k < kAtOnce; ++k)
        ids[i + k] = kind(hash_two_words(text + splits[i + k], size(i + k)));
    else
      for (std::size_t k = 0; k < kAtOnce; ++k) hash_one(i + k);
  }
  for (; i < texts; ++i) hash_one(i);
  std::iota(packed.splits.begin() + static_cast<std::ptrdiff_t>(cell), packed.splits.end(),
            static_cast<std::int64_t>(first) + 1);
}

// Adds the ids of a text, which may be a list with separators; false if one cannot be read.
bool add_cell(const RawIds& feature, std::string_view cell, PackedIds& packed) {
  bool fine = true;
  each_value(cell, feature.separator, [&](std::string_view item) {
    if (feature.kind == RawIds::Kind::kHashed) {
      packed.ids.push_back(feature.id(hash_bytes(std::as_bytes(std::span(item)))));
      return true;
    }
    std::int64_t value = 0;
    fine = read_whole(strip(item), value).empty() && feature.id.takes(value);
    packed.ids.push_back(feature.id.of(value));
    return fine;
  });
  return fine;
}

}  // namespace

bool add_text_ids(const RawIds& feature, std::span<const std::string_view> cells, PackedIds& packed) {
  if (feature.kind != RawIds::Kind::kHashed && feature.kind != RawIds::Kind::kWholeTexts) return false;
  for (const std::string_view cell : cells) {
    if (!add_cell(feature, cell, packed)) return false;
    packed.splits.push_back(static_cast<std::int64_t>(packed.ids.size()));
  }
  return true;
}

bool add_ids(const RawIds& feature, PackedIds& packed) {
  using Kind = RawIds::Kind;
  if (feature.kind == Kind::kHashed || feature.kind == Kind::kWholeTexts) {
    const TextColumn& column = feature.texts;
    if (feature.kind == Kind::kHashed && !feature.separator && is_one_each(column)) {
      add_hashes(column, feature.id, packed);
      return true;
    }
    check_splits(column.splits, column.text.size());
    check_splits(column.rows, column.splits.size() - 1);
    const auto* const text = reinterpret_cast<const char*>(column.text.data());
    bool fine = true;
    for (std::size_t row = 0; row + 1 < column.rows.size() && fine; ++row) {
      for (std::int64_t at = column.rows[row]; at < column.rows[row + 1]; ++at) {
        const std::string_view cell(text + column.splits[at],
                                    static_cast<std::size_t>(column.splits[at + 1] - column.splits[at]));
        fine = add_cell(feature, cell, packed);
        if (!fine) break;
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
