#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "check.h"
#include "hash.h"
#include "row_choice.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;
using Found = std::vector<Wishes>;

SourceColumn ints(const Ids& values, const Ids& splits) {
  SourceColumn view;
  view.ints = values;
  view.splits = splits;
  settle_column(view);
  return view;
}

Found asked(const RowTest& test, const SourceColumn& column, const Ids& rows) {
  const SourceColumn* const block = &column;
  Found found(rows.size());
  RowChoice(test).ask(Places({&block, 1}, {}, rows), found);
  return found;
}

void a_row_is_hashed_alike_wherever_it_is() {
  Ids values(1000), splits(1001), rows(1000);
  for (std::size_t i = 0; i < 1000; ++i) {
    values[i] = static_cast<std::int64_t>(i * i);
    splits[i + 1] = static_cast<std::int64_t>(i + 1);
    rows[i] = static_cast<std::int64_t>(i * 7 % 1000);
  }
  const SourceColumn column = ints(values, splits);
  const SourceColumn* const block = &column;
  std::vector<std::uint64_t> ordered(1000), scattered(1000);
  Ids in_order(splits.begin(), splits.end() - 1);
  hash_column(Places({&block, 1}, {}, in_order), false, ordered);
  hash_column(Places({&block, 1}, {}, rows), false, scattered);
  for (std::size_t i = 0; i < 1000; ++i) {
    CHECK(scattered[i] == ordered[static_cast<std::size_t>(rows[i])]);
    CHECK(ordered[i] == mix(mix(mix(std::uint64_t(values[i])) + 1)));
  }
}

void values_fulfil_wishes() {
  const Ids values{5, 6, -1, 7}, splits{0, 2, 2, 3, 4}, rows{3, 0, 1, 2};
  const SourceColumn column = ints(values, splits);
  RowTest test;
  test.ints = {5, 6, -1, 5};
  test.wishes = {1, 2, 4, 8};
  CHECK(asked(test, column, rows) == (Found{0, 1 | 2 | 8, 0, 4}));
  test.how = RowTest::How::kBetween;
  test.ints = {-1, 6};
  CHECK(asked(test, column, rows) == (Found{0, 1, 0, 1}));
}

void rules_are_any_none_and_all() {
  RowTest test;
  test.ints = {1};
  test.wishes = {1};
  test.any = 1;
  test.none = 2;
  test.all = 12;
  const RowChoice choice(test);
  CHECK(choice.passes(1 | 12) && !choice.passes(12) && !choice.passes(1 | 4) && !choice.passes(1 | 2 | 12));
}

void numbers_that_are_none_equal_nothing() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values{nan, -0.0f, 1};
  const Ids splits{0, 1, 2, 3}, rows{0, 1, 2};
  SourceColumn column;
  column.type = ColumnType::kFloat;
  column.floats = values;
  column.splits = splits;
  settle_column(column);
  RowTest test;
  test.decimals = {double{nan}, 0};
  test.wishes = {1, 2};
  CHECK(asked(test, column, rows) == (Found{0, 2, 0}));
}

void operands_of_another_type_are_refused() {
  const Ids values{1}, splits{0, 1}, rows{0};
  RowTest test;
  test.texts = {"a"};
  test.wishes = {1};
  CHECK_THROWS(std::invalid_argument, "another type", asked(test, ints(values, splits), rows));
  test.ints = {1};
  CHECK_THROWS(std::invalid_argument, "operands", asked(test, ints(values, splits), rows));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"a row is hashed alike wherever it is", a_row_is_hashed_alike_wherever_it_is},
      {"values fulfil wishes", values_fulfil_wishes},
      {"rules are any, none and all", rules_are_any_none_and_all},
      {"numbers that are none equal nothing", numbers_that_are_none_equal_nothing},
      {"operands of another type are refused", operands_of_another_type_are_refused},
  });
}
