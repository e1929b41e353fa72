// Choosing rows by their values: which records a filter keeps, and which part of a split they are in.
//
// The values stay where they are, in the blocks that were parsed: a choice looks at the columns that decide
// and returns one byte for each row. Columns are worked through one after the other, because each is one
// piece of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "row_gather.h"

namespace monolith {

// Adds a hash of the values that each row has in a column to its total: total = mix(total ^ hash). Numbers
// count by their bits and texts by their hash; in a column of times, a text of a whole number counts as that
// number. Which part of a split a record is in depends on it, so it never changes.
void hash_column(const Places& places, bool times, std::span<std::uint64_t> totals);

// Whether a hash, as a number from 0 to below 1, is in [low, high).
inline bool is_between(std::uint64_t hash, double low, double high) {
  const double drawn = static_cast<double>(hash >> 11) * 0x1p-53;
  return low <= drawn && drawn < high;
}

// Which of up to 64 wishes something fulfils: bit w for wish w.
using Wishes = std::uint64_t;

// What each of some numbers or texts fulfils; all others fulfil nothing. Immutable.
template <class Key>
class WishesOf {
 public:
  WishesOf() = default;
  // Of keys that are the same, each counts.
  WishesOf(std::span<const Key> keys, std::span<const Wishes> wishes);

  Wishes find(Key key) const;

 private:
  struct Slot {
    Key key;
    Wishes wishes;  // none: the slot is free
  };
  std::vector<Slot> slots_;  // a power of two, at least one of them free
};

// What a filter asks of the values of a row.
struct RowTest {
  enum class How { kOneOf, kAbove, kFrom, kBelow, kUpTo, kBetween, kBegins, kEnds };

  How how = How::kOneOf;
  // The operands of one of these types are set. Decimal numbers are asked of columns of whole numbers, too,
  // which are then compared as float64.
  std::vector<std::int64_t> ints;
  std::vector<double> decimals;
  std::vector<std::string> texts;
  std::vector<Wishes>
      wishes;  // kOneOf: what a value fulfils that is the operand; otherwise a match is wish 0
  // kOneOf of ids: compares only their bits from `shift` on that `bits` has, such as the slot.
  int shift = 0;
  std::uint64_t bits = ~std::uint64_t{0};

  // A row passes if its values together fulfil one of `any`, if there are any, none of `none` and all of
  // `all`.
  Wishes any = 0, none = 0, all = 0;
};

// A test that is ready to be asked. Any number of threads may ask.
class RowChoice {
 public:
  // Throws std::invalid_argument for operands that do not go with what is asked.
  explicit RowChoice(RowTest test);
  RowChoice(const RowChoice&) = delete;  // `texts_` are views of the test
  RowChoice& operator=(const RowChoice&) = delete;

  const RowTest& test() const { return test_; }

  // Adds what the values of each row in a column fulfil. Throws std::invalid_argument for a column of another
  // type than the operands.
  void ask(const Places& places, std::span<Wishes> found) const;
  bool passes(Wishes found) const {
    return (test_.any == 0 || (found & test_.any) != 0) && (found & test_.none) == 0 &&
           (found & test_.all) == test_.all;
  }

 private:
  template <class Value>
  void ask_numbers(const Places& places, std::span<Wishes> found, Value&& value) const;

  const RowTest test_;
  WishesOf<std::int64_t> numbers_;  // decimals by their bits
  WishesOf<std::string_view> texts_;
};

// Whether a row has as many numbers as there are thresholds, and one of them reaches that of its place.
std::vector<std::uint8_t> reaches(const Places& places, std::span<const float> thresholds);

}  // namespace monolith
