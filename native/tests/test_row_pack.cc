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
  CHECK(copy_row_numbers({}, blocks, {}, Ids{2, 0, 1}, out) == 2);
  CHECK(std::isnan(out[0]) && out[1] == 0.5F && std::isnan(out[2]));
  out.resize(1);
  CHECK(copy_row_numbers({}, blocks, {}, Ids{3}, out) == -1);
  CHECK(copy_row_numbers({.kind = RowNumbers::kClasses}, blocks, {}, Ids{0}, out) == -1);
  const SourceColumn* const sevens[] = {&ones};
  CHECK(copy_row_numbers({}, sevens, {}, first, out) == 0 && out[0] == 7);
  const SourceColumn* const pairs[] = {&pair};
  CHECK(copy_row_numbers({}, pairs, {}, first, out) == -1);
}

void wide_numbers_are_copied_whole_or_not_at_all() {
  const std::vector<float> a{1, 2, 3, kNaN};
  const Ids splits{0, 2, 2, 4}, three{0, 3}, rows{0, 1, 2}, inner{0, 7, 7, 9}, each{0, 1, 2, 3};
  const SourceColumn block = floats(a, splits), long_row = floats(a, three);
  const SourceColumn* const blocks[] = {&block};
  std::vector<float> out(6);
  CHECK(copy_row_numbers({.width = 2}, blocks, {}, rows, out) == 2);
  CHECK(out[0] == 1 && out[1] == 2 && std::isnan(out[2]) && std::isnan(out[3]) && out[4] == 3);
  const SourceColumn* const odd[] = {&long_row};
  CHECK(copy_row_numbers({.width = 2}, odd, {}, Ids{0}, std::span(out).first(2)) == -1);
  const SourceColumn text = texts("0.5| -1x|", inner, each);
  const SourceColumn* const of_texts[] = {&text};
  const NumberPlan reads{.width = 2, .reads_texts = true, .separator = '|'};
  CHECK(copy_row_numbers(reads, of_texts, {}, Ids{0, 1}, std::span(out).first(4)) == 1);
  CHECK(out[0] == 0.5F && out[1] == -1);
  CHECK(copy_row_numbers(reads, of_texts, {}, Ids{2}, std::span(out).first(2)) == -1);
  CHECK(copy_row_numbers({.width = 2}, of_texts, {}, Ids{0}, std::span(out).first(2)) == -1);
}

void times_are_seconds_of_any_unit() {
  constexpr TimePlan kBySize{.oldest = 100'000'000, .latest = (std::int64_t{1} << 32) - 1};
  const auto read = [](TimePlan plan, std::string_view text) {
    const Ids inner{0, static_cast<std::int64_t>(text.size())}, one{0, 1};
    const SourceColumn block = texts(text, inner, one);
    const SourceColumn* const blocks[] = {&block};
    const auto found = read_row_times(plan, blocks, {}, Ids{0});
    return found && !found->seconds.empty() ? found->seconds[0] : -1;
  };
  for (const std::string_view text : {"1714557600", "1714557600123", "1714557600123456",
                                      "1714557600123456789", "2024-05-01T10:00:00Z", "2024-05-01 10:00:00"})
    CHECK(read(kBySize, text) == 1'714'557'600);
  CHECK(read(kBySize, "2024-02-29") == 1'709'164'800);
  for (const std::string_view text :
       {"2023-02-29", "2024-05-01T24:00:00", "2024-05-01T10:00:00+02", "2024-05-01t10:00:00", "17x", "-5",
        "1714557600.5", "12345678901234567890", "0000-00-00", "4294967296", " 5"})
    CHECK(read(kBySize, text) == -1);
  TimePlan milliseconds = kBySize, iso = kBySize;
  milliseconds.per_second = 1'000;
  iso.iso_texts = true;
  CHECK(read(milliseconds, "1714557600123") == 1'714'557'600);
  CHECK(read(milliseconds, "1714557600") == -1);
  CHECK(read(iso, "1714557600") == -1 && read(iso, "2024-05-01") == 1'714'521'600);
}

void a_row_without_a_time_has_none() {
  const Ids numbers{5, 7, 1'714'557'600'123}, splits{0, 1, 1, 2, 3}, two{0, 3}, rows{0, 1, 2, 3};
  const SourceColumn block = ints(numbers, splits), several = ints(numbers, two);
  const SourceColumn* const blocks[] = {&block};
  const TimePlan plan{.oldest = 100'000'000, .latest = (std::int64_t{1} << 32) - 1};
  const auto found = read_row_times(plan, blocks, {}, rows);
  CHECK(found && found->seconds == (Ids{5, 7, 1'714'557'600}) && found->splits == (Ids{0, 1, 1, 2, 3}));
  CHECK(found->forms == RowTimes::kMilliseconds);
  const auto each = read_row_times(plan, blocks, {}, Ids{2, 0});
  CHECK(each && each->splits.empty() && each->seconds == (Ids{7, 5}));
  const SourceColumn* const odd[] = {&several};
  CHECK(!read_row_times(plan, odd, {}, Ids{0}));
}

void weights_follow_the_ids_of_their_rows() {
  const Ids items{1, 2, 3}, splits{0, 2, 3, 3}, rows{2, 1, 0}, weight_splits{0, 2, 2, 2};
  const std::vector<float> given{0.5F, kNaN}, infinite{0.5F, std::numeric_limits<float>::infinity()};
  const SourceColumn ids = ints(items, splits), weights = floats(given, weight_splits),
                     odd = floats(infinite, weight_splits);
  const RowFeature weighted{{{.kind = RowColumn::Kind::kIds, .ids = feature(Kind::kInts), .times = {}},
                             {.kind = RowColumn::Kind::kWeights, .ids = feature(Kind::kInts), .times = {}}}};
  WeightedIds packed;
  packed.ids = {{9}, {0, 1}};  // of a feature without weights
  std::vector<std::uint32_t> forms;
  const std::vector<std::vector<const SourceColumn*>> fine{{&ids}, {&weights}}, wrong{{&ids}, {&odd}};
  CHECK(!add_row_feature(weighted, wrong, {}, rows, nullptr, packed, forms));
  CHECK(packed.ids.ids == (Ids{9}) && packed.ids.splits == (Ids{0, 1}) && !packed.weights && forms.empty());
  CHECK(add_row_feature(weighted, fine, {}, rows, nullptr, packed, forms));
  CHECK(packed.ids.ids == (Ids{9, 3, 1, 2}) && packed.ids.splits == (Ids{0, 1, 1, 2, 4}));
  CHECK(*packed.weights == (std::vector<float>{1, 1, 0.5F, 1}));
  CHECK(!add_row_feature(weighted, wrong, {}, rows, nullptr, packed, forms));
  CHECK(packed.ids.ids.size() == 4 && packed.weights->size() == 4);
}

void sequences_keep_the_last_and_the_gaps_to_the_event() {
  const Ids items{1, 2, 3, 4}, splits{0, 3, 3, 4}, rows{0, 1, 2}, at{70, 80, 95, 1};
  const SourceColumn ids = ints(items, splits), times = ints(at, splits);
  const RowTimes events{{100, 100}, {0, 1, 2, 2}};  // the last row has none
  const std::vector<double> boundaries{10};
  RawIds buckets = feature(Kind::kIntBuckets);
  buckets.boundaries = boundaries;
  RowFeature sequence;
  const TimePlan seconds{.oldest = 100'000'000, .latest = 1'000};
  sequence.columns = {{RowColumn::Kind::kIds, feature(Kind::kInts), {}},
                      {RowColumn::Kind::kGaps, buckets, seconds}};
  sequence.most = 2;
  sequence.keeps_last = true;
  const std::vector<std::vector<const SourceColumn*>> columns{{&ids}, {&times}};
  std::vector<std::uint32_t> forms;
  WeightedIds packed;
  packed.ids.splits = {0};
  CHECK(!add_row_feature(sequence, columns, {}, rows, nullptr, packed, forms));
  CHECK(add_row_feature(sequence, columns, {}, rows, &events, packed, forms));
  CHECK(packed.ids.ids == (Ids{2, 3, 4, 1, 0}));
  CHECK(packed.ids.splits == (Ids{0, 2, 2, 3, 5, 5, 5}));
  CHECK(!packed.weights && forms.size() == 2);
}

void steps_have_a_value_in_each_column() {
  const Ids numbers{1, 2, 3}, whole{0, 2, 3}, fewer{0, 1, 3}, rows{0, 1}, inner{0, 3, 4}, gap{0, 2, 3},
      each{0, 1, 2};
  const SourceColumn items = ints(numbers, whole), others = ints(numbers, fewer),
                     listed = texts("a|bc", inner, each), gaps = texts("||b", gap, each);
  RawIds hashed = feature(Kind::kHashed);
  hashed.separator = '|';
  RowFeature history;
  history.columns = {{RowColumn::Kind::kIds, feature(Kind::kInts), {}}, {RowColumn::Kind::kIds, hashed, {}}};
  history.steps = true;
  std::vector<std::uint32_t> forms;
  WeightedIds packed;
  packed.ids.splits = {0};
  const auto add = [&](const SourceColumn& first, const SourceColumn& second) {
    const std::vector<std::vector<const SourceColumn*>> columns{{&first}, {&second}};
    return add_row_feature(history, columns, {}, rows, nullptr, packed, forms);
  };
  CHECK(!add(others, listed));
  CHECK(!add(items, gaps));
  CHECK(add(items, listed));
  CHECK(packed.ids.splits == (Ids{0, 2, 3, 5, 6}));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"ids of many blocks follow those before", ids_of_many_blocks_follow_those_before},
      {"texts are hashed as gathered ones are", texts_are_hashed_as_gathered_ones_are},
      {"an id too large for its slot is odd", an_id_too_large_for_its_slot_is_odd},
      {"numbers are one for each row or none", numbers_are_one_for_each_row_or_none},
      {"wide numbers are copied whole or not at all", wide_numbers_are_copied_whole_or_not_at_all},
      {"times are seconds of any unit", times_are_seconds_of_any_unit},
      {"a row without a time has none", a_row_without_a_time_has_none},
      {"weights follow the ids of their rows", weights_follow_the_ids_of_their_rows},
      {"sequences keep the last, and the gaps to the event",
       sequences_keep_the_last_and_the_gaps_to_the_event},
      {"steps have a value in each column", steps_have_a_value_in_each_column},
  });
}
