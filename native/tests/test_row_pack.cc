#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "check.h"
#include "row_pack.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;
using Kind = RawIds::Kind;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

SourceColumn settled(SourceColumn view, const Ids& splits) {
  view.splits = splits;
  settle_column(view);
  return view;
}

SourceColumn ints(const Ids& values, const Ids& splits) {
  SourceColumn view;
  view.ints = values;
  return settled(view, splits);
}

SourceColumn floats(const std::vector<float>& values, const Ids& splits) {
  SourceColumn view;
  view.type = ColumnType::kFloat;
  view.floats = values;
  return settled(view, splits);
}

SourceColumn texts(std::string_view bytes, const Ids& inner, const Ids& splits) {
  SourceColumn view;
  view.type = ColumnType::kBytes;
  view.bytes = std::as_bytes(std::span(bytes));
  view.inner = inner;
  return settled(view, splits);
}

RawIds feature(Kind kind) {
  return {kind, {}, {}, {}, {}, {}, std::nullopt, {}};
}

void ids_of_many_blocks_follow_those_before() {
  const Ids a{1, 2}, b{3, 4}, one_each{0, 1, 2}, ragged{0, 2, 2}, rows{1, 0, 1};
  const SourceColumn first = ints(a, one_each), second = ints(b, ragged), third = ints(b, one_each);
  const std::vector<std::int32_t> block_of{0, 1, 1};
  PackedIds packed;
  packed.splits = {0};
  const SourceColumn* const mixed[] = {&first, &second};
  CHECK(add_row_ids(feature(Kind::kInts), mixed, block_of, rows, packed));
  CHECK(packed.ids == (Ids{2, 3, 4}));
  CHECK(packed.splits == (Ids{0, 1, 3, 3}));
  const SourceColumn* const plain[] = {&first, &third};
  CHECK(add_row_ids(feature(Kind::kInts), plain, block_of, rows, packed));
  CHECK(packed.ids == (Ids{2, 3, 4, 2, 3, 4}));
  CHECK(packed.splits == (Ids{0, 1, 3, 3, 4, 5, 6}));
}

void texts_are_hashed_as_gathered_ones_are() {
  const Ids inner{0, 2, 3}, one_each{0, 1, 2}, rows{1, 0};
  const SourceColumn block = texts("abc", inner, one_each);
  const SourceColumn* const blocks[] = {&block};
  PackedIds packed, expected;
  packed.splits = expected.splits = {0};
  CHECK(add_row_ids(feature(Kind::kHashed), blocks, {}, rows, packed));
  const std::string_view cells[] = {"c", "ab"};
  CHECK(add_text_ids(feature(Kind::kHashed), cells, expected));
  CHECK(packed.ids == expected.ids && packed.splits == expected.splits);
  CHECK(!add_row_ids(feature(Kind::kWholeTexts), blocks, {}, rows, packed));  // no numbers
}

void an_id_too_large_for_its_slot_is_odd() {
  const Ids a{std::int64_t{1} << 60}, one{0, 1}, rows{0};
  const SourceColumn block = ints(a, one);
  const SourceColumn* const blocks[] = {&block};
  PackedIds packed;
  packed.splits = {0};
  RawIds with_slot = feature(Kind::kInts);
  with_slot.id = {3};
  CHECK(!add_row_ids(with_slot, blocks, {}, rows, packed));
}

void numbers_are_one_for_each_row_or_none() {
  const std::vector<float> a{0.5F, kNaN, std::numeric_limits<float>::infinity()};
  const Ids splits{0, 1, 1, 2, 3}, whole{7}, two{7, 8}, one{0, 1}, both{0, 2}, first{0};
  const SourceColumn block = floats(a, splits), ones = ints(whole, one), pair = ints(two, both);
  const SourceColumn* const blocks[] = {&block};
  std::vector<float> out(3);
  CHECK(copy_row_numbers(RowNumbers::kAny, blocks, {}, Ids{2, 0, 1}, out) == 2);
  CHECK(std::isnan(out[0]) && out[1] == 0.5F && std::isnan(out[2]));
  out.resize(1);
  CHECK(copy_row_numbers(RowNumbers::kAny, blocks, {}, Ids{3}, out) == -1);
  CHECK(copy_row_numbers(RowNumbers::kClasses, blocks, {}, Ids{0}, out) == -1);
  const SourceColumn* const sevens[] = {&ones};
  CHECK(copy_row_numbers(RowNumbers::kAny, sevens, {}, first, out) == 0 && out[0] == 7);
  const SourceColumn* const pairs[] = {&pair};
  CHECK(copy_row_numbers(RowNumbers::kAny, pairs, {}, first, out) == -1);
}

}  // namespace

int main() {
  return monolith::check::run({
      {"ids of many blocks follow those before", ids_of_many_blocks_follow_those_before},
      {"texts are hashed as gathered ones are", texts_are_hashed_as_gathered_ones_are},
      {"an id too large for its slot is odd", an_id_too_large_for_its_slot_is_odd},
      {"numbers are one for each row or none", numbers_are_one_for_each_row_or_none},
  });
}
