#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "row_gather.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;

SourceColumn ints(const Ids& values, const Ids& splits) {
  SourceColumn view;
  view.ints = values;
  view.splits = splits;
  settle_column(view);
  return view;
}

SourceColumn texts(std::string_view bytes, const Ids& inner, const Ids& splits) {
  SourceColumn view;
  view.type = ColumnType::kBytes;
  view.bytes = std::as_bytes(std::span(bytes));
  view.inner = inner;
  view.splits = splits;
  settle_column(view);
  return view;
}

void rows_of_many_blocks_come_in_the_order_asked_for() {
  const Ids a{1, 2, 3}, b{4, 5}, three{0, 1, 2, 3}, two{0, 1, 2}, rows{2, 0, 0, 2};
  const SourceColumn first = ints(a, three), second = ints(b, two);
  CHECK(first.one_each && second.one_each);
  const SourceColumn* const blocks[] = {&first, &second};
  const std::vector<std::int32_t> block_of{0, 1, 0, 0};
  const ParsedColumn found = gather_column(blocks, block_of, rows);
  CHECK(found.ints == (Ids{3, 4, 1, 3}));
  CHECK(found.splits.empty());  // one value in each row
}

void rows_with_none_or_many_values_keep_them() {
  const Ids a{1, 2, 3}, b{4}, splits{0, 2, 2, 3}, one{0, 1}, rows{2, 0, 0, 1};
  const SourceColumn first = ints(a, splits), second = ints(b, one);
  CHECK(!first.one_each);
  const SourceColumn* const blocks[] = {&first, &second};
  const std::vector<std::int32_t> block_of{0, 1, 0, 0};
  const ParsedColumn found = gather_column(blocks, block_of, rows);
  CHECK(found.ints == (Ids{3, 4, 1, 2}));
  CHECK(found.splits == (Ids{0, 1, 2, 4, 4}));
}

void strings_move_with_their_bytes() {
  const Ids inner{0, 2, 2, 5}, splits{0, 2, 2, 3}, rows{2, 1, 0};
  const SourceColumn one = texts("abcde", inner, splits);
  const SourceColumn* const blocks[] = {&one};
  const ParsedColumn found = gather_column(blocks, {}, rows);
  CHECK(std::string(found.bytes.begin(), found.bytes.end()) == "cdeab");
  CHECK(found.inner == (Ids{0, 3, 5, 5}));
  CHECK(found.splits == (Ids{0, 1, 1, 3}));
}

void nothing_is_gathered_of_no_places() {
  const Ids inner{0}, splits{0};
  const SourceColumn one = texts("", inner, splits);
  const SourceColumn* const blocks[] = {&one};
  const ParsedColumn found = gather_column(blocks, {}, {});
  CHECK(found.splits.empty() && found.inner == (Ids{0}) && found.bytes.empty());
}

void splits_beyond_their_values_are_refused() {
  const Ids values{1, 2}, beyond{0, 3}, falling{0, 2, 1}, row{0, 1};
  CHECK_THROWS(std::invalid_argument, "splits", ints(values, beyond));
  CHECK_THROWS(std::invalid_argument, "splits", ints(values, falling));
  CHECK_THROWS(std::invalid_argument, "splits", texts("ab", beyond, row));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"rows of many blocks come in the order asked for", rows_of_many_blocks_come_in_the_order_asked_for},
      {"rows with none or many values keep them", rows_with_none_or_many_values_keep_them},
      {"strings move with their bytes", strings_move_with_their_bytes},
      {"nothing is gathered of no places", nothing_is_gathered_of_no_places},
      {"splits beyond their values are refused", splits_beyond_their_values_are_refused},
  });
}
