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
#include <string_view>
#include <vector>

#include "fid.h"

namespace monolith {

// Throws std::invalid_argument for splits that fall or reach beyond the `size` values that they split.
void check_splits(std::span<const std::int64_t> splits, std::size_t size);

// How a hash becomes an id: as it is, all 64 bits, or as a fid of version 2 in a slot.
struct IdKind {
  std::optional<std::uint32_t> slot;

  std::int64_t operator()(std::uint64_t hash) const {
    return slot ? make_fid(2, *slot, hash) : static_cast<std::int64_t>(hash);
  }
  // Whether a value stays what it is: a fid has 48 bits for it.
  bool takes(std::int64_t value) const { return !slot || value >> kSignatureBits[1] == 0; }
  std::int64_t of(std::int64_t value) const { return (*this)(static_cast<std::uint64_t>(value)); }
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

// One feature of ids, as its raw column has it.
struct RawIds {
  enum class Kind : std::uint8_t { kHashed, kWholeTexts, kInts, kIntBuckets, kFloatBuckets };

  Kind kind;
  TextColumn texts;                    // of the first two kinds
  std::span<const std::int64_t> ints;  // of those that begin so
  std::span<const float> floats;
  std::span<const std::int64_t> rows;  // where there are no texts: of rows among the numbers
  std::span<const double> boundaries;  // rising; a number that is one of them is in the bucket above
  std::optional<char> separator;
  IdKind id;
};

struct PackedIds {
  std::vector<std::int64_t> ids;     // of all features, cell after cell
  std::vector<std::int64_t> splits;  // where each cell begins, then their number
  bool fine = true;                  // false: something could not be read, and the rest means nothing
};

// Adds the ids of one feature; false if something cannot be read, and the rest means nothing then.
bool add_ids(const RawIds& feature, PackedIds& packed);
// The same of one text per row, wherever each is; `texts` of the feature are not read.
bool add_text_ids(const RawIds& feature, std::span<const std::string_view> cells, PackedIds& packed);

// The ids of many features in one pass, as a batch has them.
PackedIds pack_ids(std::span<const RawIds> features);

// Columns of exactly one finite number in each row, one after the other; false where one has other rows.
// `ints` are whole numbers in place of `floats`, and `rows` as above. `out` has room for all.
struct RawNumbers {
  std::span<const std::int64_t> ints;
  std::span<const float> floats;
  std::span<const std::int64_t> rows;
};
bool pack_numbers(std::span<const RawNumbers> columns, std::size_t rows, std::span<float> out);

// One id for every way to take one id of each column, the last column's changing first. Rows with more than
// `most` ways are bad.
Lists<std::int64_t> cross_cells(std::span<const IdColumn> columns, std::size_t most, IdKind kind);

}  // namespace monolith
