#include "row_choice.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "cells.h"
#include "fid.h"
#include "hash.h"
#include "texts.h"

namespace monolith {
namespace {

// Rows of shuffled records are all over the memory of their blocks. So what leads to a value is asked for
// twice as many rows before its turn as the bytes of a text, whose place is only known then.
constexpr std::size_t kAhead = 16;

bool are_scattered(const Places& places) {
  for (std::size_t i = 1; i < places.size(); ++i)
    if (places.row(i) != places.row(i - 1) + 1) return true;
  return false;
}

void ask_for_value(const Places& places, std::size_t i) {
  const SourceColumn& block = places.block(i);
  const std::size_t row = places.row(i);
  if (!block.one_each) __builtin_prefetch(block.splits.data() + row);
  // The value itself is elsewhere if rows do not have one each; most have about one.
  if (block.type == ColumnType::kInt64)
    __builtin_prefetch(block.ints.data() + row);
  else if (block.type == ColumnType::kFloat)
    __builtin_prefetch(block.floats.data() + row);
  else if (block.one_each)
    __builtin_prefetch(block.inner.data() + row);
}

void ask_for_bytes(const Places& places, std::size_t i) {
  const SourceColumn& block = places.block(i);
  if (block.type == ColumnType::kBytes && block.one_each)
    __builtin_prefetch(block.bytes.data() + block.inner[places.row(i)]);
}

// Calls each(i, block, begin, end) for each row, where its values are.
template <class Each>
void for_each_row(const Places& places, Each&& each) {
  const std::size_t size = places.size();
  const bool scattered = are_scattered(places), one_each = places.one_each();
  for (std::size_t i = 0; i < size; ++i) {
    if (scattered) {
      if (i + 2 * kAhead < size) ask_for_value(places, i + 2 * kAhead);
      if (i + kAhead < size) ask_for_bytes(places, i + kAhead);
    }
    if (one_each) {
      const std::size_t row = places.row(i);
      each(i, places.block(i), row, row + 1);
    } else {
      const auto [begin, end] = places.values(i);
      each(i, places.block(i), static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
    }
  }
}

std::span<const std::byte> text_at(const SourceColumn& block, std::size_t at) {
  const auto begin = static_cast<std::size_t>(block.inner[at]);
  return block.bytes.subspan(begin, static_cast<std::size_t>(block.inner[at + 1]) - begin);
}

std::string_view as_view(std::span<const std::byte> text) {
  return {reinterpret_cast<const char*>(text.data()), text.size()};
}

// Whether a text is a whole number that 64 bits hold for certain: up to 18 digits, a sign among them.
bool is_certainly_whole(std::string_view text) {
  if (text.empty() || text.size() > 18 || text == "-") return false;
  const std::string_view digits = text.substr(text.front() == '-' ? 1 : 0);
  return std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
}

std::uint64_t hash_time(std::span<const std::byte> text) {
  std::int64_t whole = 0;
  const std::string_view read = as_view(text);
  if (is_certainly_whole(read) && read_whole(read, whole).empty()) return static_cast<std::uint64_t>(whole);
  return hash_bytes(text);
}

// hash(block, at): of one value.
template <class Hash>
void add_hashes(const Places& places, std::span<std::uint64_t> totals, Hash&& hash) {
  for_each_row(places, [&](std::size_t i, const SourceColumn& block, std::size_t begin, std::size_t end) {
    std::uint64_t sum = 0;
    for (std::size_t at = begin; at < end; ++at) sum += mix(hash(block, at) + mix(at - begin));
    totals[i] = mix(totals[i] ^ mix(sum + (end - begin)));
  });
}

std::uint64_t hash_key(std::int64_t key) {
  return mix(static_cast<std::uint64_t>(key));
}
std::uint64_t hash_key(std::string_view key) {
  return hash_bytes(std::as_bytes(std::span(key)));
}

// The bits of a number, by which it is found: those of 0 for -0, which is the same number.
std::int64_t bits_of_decimal(double number) {
  return std::bit_cast<std::int64_t>(number == 0 ? 0.0 : number);
}

}  // namespace

void hash_column(const Places& places, bool times, std::span<std::uint64_t> totals) {
  if (places.size() == 0) return;
  switch (places.block(0).type) {
    case ColumnType::kInt64:
      add_hashes(places, totals, [](const SourceColumn& block, std::size_t at) {
        return static_cast<std::uint64_t>(block.ints[at]);
      });
      break;
    case ColumnType::kFloat:
      add_hashes(places, totals, [](const SourceColumn& block, std::size_t at) {
        return std::uint64_t{std::bit_cast<std::uint32_t>(block.floats[at])};
      });
      break;
    case ColumnType::kBytes:
      if (times)
        add_hashes(places, totals,
                   [](const SourceColumn& block, std::size_t at) { return hash_time(text_at(block, at)); });
      else
        add_hashes(places, totals,
                   [](const SourceColumn& block, std::size_t at) { return hash_bytes(text_at(block, at)); });
      break;
  }
}

template <class Key>
WishesOf<Key>::WishesOf(std::span<const Key> keys, std::span<const Wishes> wishes)
    : slots_(std::bit_ceil(2 * keys.size() + 1)) {
  if (keys.size() != wishes.size()) throw std::invalid_argument("wishes: give those of each key");
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (wishes[i] == 0) continue;
    std::size_t at = hash_key(keys[i]) & (slots_.size() - 1);
    while (slots_[at].wishes != 0 && slots_[at].key != keys[i]) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {keys[i], slots_[at].wishes | wishes[i]};
  }
}

template <class Key>
Wishes WishesOf<Key>::find(Key key) const {
  std::size_t at = hash_key(key) & (slots_.size() - 1);
  while (slots_[at].wishes != 0 && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
  return slots_[at].wishes;
}

template class WishesOf<std::int64_t>;
template class WishesOf<std::string_view>;

RowChoice::RowChoice(RowTest test) : test_(std::move(test)) {
  const std::size_t operands = test_.ints.size() + test_.decimals.size() + test_.texts.size();
  const bool one_type = operands == std::max({test_.ints.size(), test_.decimals.size(), test_.texts.size()});
  const bool texts_only = test_.how == RowTest::How::kBegins || test_.how == RowTest::How::kEnds;
  const bool one_of = test_.how == RowTest::How::kOneOf;
  const std::size_t wanted = test_.how == RowTest::How::kBetween ? 2 : 1;
  if (!one_type || (texts_only && operands != test_.texts.size()) ||
      (!one_of && !texts_only && (operands != wanted || !test_.texts.empty())))
    throw std::invalid_argument("row test: the operands do not go with what is asked");
  if (test_.shift < 0 || test_.shift > 63) throw std::invalid_argument("row test: a shift is from 0 to 63");
  if (!one_of) return;
  if (!test_.texts.empty()) {
    const std::vector<std::string_view> views(test_.texts.begin(), test_.texts.end());
    texts_ = WishesOf<std::string_view>(views, test_.wishes);
  } else if (!test_.decimals.empty()) {
    std::vector<std::int64_t> keys;
    std::vector<Wishes> wishes;
    for (std::size_t i = 0; i < test_.decimals.size() && i < test_.wishes.size(); ++i) {
      if (test_.decimals[i] != test_.decimals[i]) continue;  // NaN is nothing, not even NaN
      keys.push_back(bits_of_decimal(test_.decimals[i]));
      wishes.push_back(test_.wishes[i]);
    }
    numbers_ = WishesOf<std::int64_t>(keys, wishes);
  } else {
    numbers_ = WishesOf<std::int64_t>(test_.ints, test_.wishes);
  }
}

template <class Value>
void RowChoice::ask_numbers(const Places& places, std::span<Wishes> found, Value&& value) const {
  using Number = std::invoke_result_t<Value, const SourceColumn&, std::size_t>;
  const auto ask = [&](auto&& wishes) {
    for_each_row(places, [&](std::size_t i, const SourceColumn& block, std::size_t begin, std::size_t end) {
      for (std::size_t at = begin; at < end; ++at) found[i] |= wishes(value(block, at));
    });
  };
  const Number* operands = nullptr;
  if constexpr (std::is_same_v<Number, double>)
    operands = test_.decimals.data();
  else
    operands = test_.ints.data();
  const Number low = test_.how == RowTest::How::kOneOf ? Number{} : operands[0];
  switch (test_.how) {
    case RowTest::How::kOneOf:
      if constexpr (std::is_same_v<Number, double>)
        ask([&](double one) { return one == one ? numbers_.find(bits_of_decimal(one)) : Wishes{0}; });
      else
        ask([&](std::int64_t one) {
          const std::uint64_t key = static_cast<std::uint64_t>(one) >> test_.shift & test_.bits;
          return numbers_.find(static_cast<std::int64_t>(key));
        });
      break;
    case RowTest::How::kAbove:
      ask([&](Number one) { return Wishes{one > low}; });
      break;
    case RowTest::How::kFrom:
      ask([&](Number one) { return Wishes{one >= low}; });
      break;
    case RowTest::How::kBelow:
      ask([&](Number one) { return Wishes{one < low}; });
      break;
    case RowTest::How::kUpTo:
      ask([&](Number one) { return Wishes{one <= low}; });
      break;
    case RowTest::How::kBetween:
      ask([&, high = operands[1]](Number one) { return Wishes{one >= low && one < high}; });
      break;
    default:
      throw std::invalid_argument("row test: only texts begin and end with something");
  }
}

void RowChoice::ask(const Places& places, std::span<Wishes> found) const {
  if (places.size() == 0) return;
  const ColumnType type = places.block(0).type;
  const bool with_decimals = !test_.decimals.empty(), with_texts = !test_.texts.empty();
  if (with_texts != (type == ColumnType::kBytes) || (type == ColumnType::kFloat && !with_decimals))
    throw std::invalid_argument("row test: the column is of another type than the operands");
  if (type == ColumnType::kFloat) {
    ask_numbers(places, found,
                [](const SourceColumn& block, std::size_t at) -> double { return block.floats[at]; });
  } else if (type == ColumnType::kInt64 && with_decimals) {
    ask_numbers(places, found, [](const SourceColumn& block, std::size_t at) {
      return static_cast<double>(block.ints[at]);
    });
  } else if (type == ColumnType::kInt64) {
    ask_numbers(places, found, [](const SourceColumn& block, std::size_t at) { return block.ints[at]; });
  } else {
    const auto wishes = [&](std::string_view text) {
      if (test_.how == RowTest::How::kOneOf) return texts_.find(text);
      return Wishes{std::ranges::any_of(test_.texts, [&](const std::string& part) {
        return test_.how == RowTest::How::kBegins ? text.starts_with(part) : text.ends_with(part);
      })};
    };
    for_each_row(places, [&](std::size_t i, const SourceColumn& block, std::size_t begin, std::size_t end) {
      for (std::size_t at = begin; at < end; ++at) found[i] |= wishes(as_view(text_at(block, at)));
    });
  }
}

std::vector<std::uint8_t> reaches(const Places& places, std::span<const float> thresholds) {
  std::vector<std::uint8_t> found(places.size());
  if (places.size() > 0 && places.block(0).type == ColumnType::kBytes)
    throw std::invalid_argument("labels: they must be numbers");
  for_each_row(places, [&](std::size_t i, const SourceColumn& block, std::size_t begin, std::size_t end) {
    bool reached = false;
    for (std::size_t place = 0; place < thresholds.size() && begin + place < end; ++place) {
      const float label = block.type == ColumnType::kFloat ? block.floats[begin + place]
                                                           : static_cast<float>(block.ints[begin + place]);
      reached |= label >= thresholds[place];
    }
    found[i] = reached && end - begin >= thresholds.size();
  });
  return found;
}

}  // namespace monolith
