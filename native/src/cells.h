// Cells: what a feature has in each example, made of raw values.
//
// A column of texts is its bytes, where each text begins in them, and where each row begins among the texts.
// A text is one value, or a list with a separator between its items; an empty one is no value. What cannot be
// read is no reason to stop: its rows are named, and have no values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fid.h"

namespace monolith {

// How a hash becomes an id: as it is, all 64 bits, or as a fid of version 2 in a slot.
struct IdKind {
  std::optional<std::uint32_t> slot;

  std::int64_t operator()(std::uint64_t hash) const {
    return slot ? make_fid(2, *slot, hash) : static_cast<std::int64_t>(hash);
  }
};

struct TextColumn {
  std::span<const std::byte> text;
  std::span<const std::int64_t> splits;  // of texts in the bytes
  std::span<const std::int64_t> rows;    // of rows among the texts
};

struct IdColumn {
  std::span<const std::int64_t> ids, splits;
};

template <class T>
struct Lists {
  std::vector<T> values;
  std::vector<std::int64_t> splits;  // of rows among the values
  std::vector<std::int64_t> bad;     // rows that could not be read, in order
};

// All throw std::invalid_argument for splits that fall or reach beyond what they split.

// One id for each item, the same as of its text alone.
Lists<std::int64_t> hash_cells(const TextColumn& column, std::optional<char> separator, IdKind kind);

// The numbers that the texts hold, with blanks around them or not.
Lists<std::int64_t> read_whole_cells(const TextColumn& column, std::optional<char> separator);
Lists<float> read_number_cells(const TextColumn& column, std::optional<char> separator);

// One id for every way to take one id of each column, the last column's changing first. Rows with more than
// `most` ways are bad.
Lists<std::int64_t> cross_cells(std::span<const IdColumn> columns, std::size_t most, IdKind kind);

}  // namespace monolith
