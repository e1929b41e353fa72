#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "json_parser.h"

namespace {

using namespace monolith;

constexpr std::size_t kAll = 1 << 20;

using Texts = std::vector<std::string>;
using Ints = std::vector<std::int64_t>;
using Numbers = std::vector<float>;

const JsonParser kParser({{"id", ColumnType::kInt64, false},
                          {"price", ColumnType::kFloat, false},
                          {"word", ColumnType::kBytes, false},
                          {"time", ColumnType::kBytes, true}},
                         {"other"}, false);

Texts strings(const ParsedColumn& column) {
  Texts found;
  for (std::size_t i = 0; i + 1 < column.inner.size(); ++i)
    found.emplace_back(column.bytes.begin() + column.inner[i], column.bytes.begin() + column.inner[i + 1]);
  return found;
}

bool is_odd(std::string_view text) {
  const std::string copy(text);  // of its own memory, for the sanitizer
  const std::string_view texts[] = {copy};
  const ParsedJson parsed = kParser.parse_texts(texts);
  for (const ParsedColumn& column : parsed.columns)
    CHECK_EQUAL(column.splits.size(), parsed.records + 1);  // an odd text leaves nothing behind
  return parsed.records == 0;
}

void objects_become_columns() {
  const ParsedJson parsed = kParser.parse_lines(
      "{\"id\": 1, \"price\": 0.5, \"word\": \"hi\", \"time\": 17}\n"
      " {\"word\":[\"a\",null,\"b\"],\"id\":[true, -2 ],\"price\":[null,2,-0]} \r\n"
      "\n{}\n{\"id\": 18446744073709551615, \"other\": {\"x\": [1, {}]}, \"time\": \"now\"}",
      kAll);
  CHECK_EQUAL(parsed.records, 4u);
  CHECK(parsed.odd.empty());
  CHECK_EQUAL(parsed.columns[0].ints, (Ints{1, 1, -2, -1}));
  CHECK_EQUAL(parsed.columns[0].splits, (Ints{0, 1, 3, 3, 4}));
  CHECK_EQUAL(parsed.columns[1].splits, (Ints{0, 1, 4, 4, 4}));
  CHECK(std::isnan(parsed.columns[1].floats[1]));
  CHECK(!std::signbit(parsed.columns[1].floats[3]));  // "-0" is a whole number
  CHECK_EQUAL(strings(parsed.columns[2]), (Texts{"hi", "a", "b"}));
  CHECK_EQUAL(strings(parsed.columns[3]), (Texts{"17", "now"}));
}

void texts_are_utf8() {
  const std::string_view texts[] = {R"({"word": "\"\\\/\b\f\n\r\t\u0041\u00e9\u20ac\ud83d\ude00"})",
                                    "{\"word\": \"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\"}"};
  const ParsedJson parsed = kParser.parse_texts(texts);
  CHECK_EQUAL(strings(parsed.columns[2]), (Texts{"\"\\/\b\f\n\r\tA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80",
                                                 "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"}));
  for (const char* const bytes :
       {"\xC3", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF",
        "\x80", "\x01", "\\ud800", "\\udc00", "\\ud800\\u0041", "\\x", "\\u12", "\\"})
    CHECK(is_odd("{\"word\": \"" + std::string(bytes) + "\"}"));
}

void what_is_not_certain_is_odd() {
  for (const char* const text : {"",
                                 " ",
                                 "nonsense",
                                 "[1]",
                                 "{",
                                 "{\"id\"}",
                                 "{\"id\":}",
                                 "{\"id\":1",
                                 "{\"id\":1,}",
                                 "{\"id\":1} x",
                                 "{\"id\":01}",
                                 "{\"id\":1.}",
                                 "{\"id\":1e}",
                                 "{\"id\":-}",
                                 "{\"id\":+1}",
                                 "{\"id\":1.0}",
                                 "{\"id\":\"1\"}",
                                 "{\"id\":18446744073709551616}",
                                 "{\"id\":-9223372036854775809}",
                                 "{\"id\":NaN}",
                                 "{\"id\":{}}",
                                 "{\"id\":[[1]]}",
                                 "{\"id\":[1,]}",
                                 "{\"id\":[1}",
                                 "{\"id\":1,\"id\":2}",
                                 "{\"unknown\":1}",
                                 "{\"\\u0069d\":1}",
                                 "{\"price\":1e999}",
                                 "{\"price\":1e39}",
                                 "{\"price\":\"1\"}",
                                 "{\"price\":Infinity}",
                                 "{\"word\":1}",
                                 "{\"word\":true}",
                                 "{\"time\":1.5}",
                                 "{\"time\":-0}",
                                 "{\"time\":1234567890123456789}",
                                 "{\"other\":[1}",
                                 "{\"other\":{1:2}}",
                                 "{\"other\":nul}",
                                 "\xEF\xBB\xBF{}"})
    CHECK(is_odd(text));
  CHECK(is_odd("{\"other\":" + std::string(1000, '[') + std::string(1000, ']') + "}"));
}

void odd_texts_are_named_in_their_places() {
  const ParsedJson parsed = kParser.parse_lines("{\"id\": 1}\nx\n{\"id\": 2}\n{\"id\": \"y\"}\n", kAll);
  CHECK_EQUAL(parsed.records, 2u);
  CHECK_EQUAL(parsed.odd.size(), 2u);
  CHECK_EQUAL(parsed.odd[0].row, 1u);
  CHECK_EQUAL(parsed.odd[0].begin, 10u);
  CHECK_EQUAL(parsed.odd[1].row, 2u);
  CHECK_EQUAL(parsed.odd[1].size, 12u);
}

void any_other_key_may_be_ignored() {
  const JsonParser parser({{"id", ColumnType::kInt64, false}}, {}, true);
  const std::string_view texts[] = {"{\"x\": 1, \"id\": 2, \"y\": []}", "{\"x\": [}"};
  CHECK_EQUAL(parser.parse_texts(texts).columns[0].ints, (Ints{2}));
  CHECK_THROWS(std::invalid_argument, "twice", JsonParser({{"a", ColumnType::kInt64, false}}, {"a"}, false));
}

void long_lines_are_cut_and_odd() {
  const ParsedJson parsed = kParser.parse_lines("{\"id\": 12345}\n{}\n", 8);
  CHECK_EQUAL(parsed.records, 1u);
  CHECK_EQUAL(parsed.odd.size(), 2u);
  CHECK_EQUAL(parsed.odd[0].size, 9u);
}

// All lines, found chunk by chunk in a window that grows by `step` bytes.
Ints chunks_of(std::string_view text, std::size_t step, std::size_t chunk_bytes, std::size_t record_bytes) {
  Ints found;
  std::size_t begin = 0, end = 0;
  while (true) {
    const std::string window(text.substr(begin, end - begin));
    const ChunkEnd cut = find_lines_chunk_end(window, end == text.size(), chunk_bytes, record_bytes);
    begin += cut.next;
    if (!cut.whole)
      end = std::min(end + step, text.size());
    else if (cut.next == 0)
      return found;
    else
      found.push_back(static_cast<std::int64_t>(begin));
  }
}

void a_chunk_ends_before_the_line_that_begins_beyond_it() {
  const std::string_view text = "ab\n\n  \ncd\nefghij\n\nk";
  CHECK_EQUAL(chunks_of(text, 100, 1, kAll), (Ints{7, 10, 18, 19}));
  CHECK_EQUAL(chunks_of(text, 100, 4, kAll), (Ints{7, 18, 19}));
  CHECK_EQUAL(chunks_of(text, 100, 1, 3), (Ints{7, 10, 14, 18, 19}));
  CHECK_EQUAL(chunks_of("\n \n", 100, 1, kAll), Ints{});
  for (std::size_t step = 1; step < 8; ++step) {
    for (const std::size_t chunk_bytes : {1, 3, 9}) {
      for (const std::size_t record_bytes : {std::size_t{3}, kAll})
        CHECK_EQUAL(chunks_of(text, step, chunk_bytes, record_bytes),
                    chunks_of(text, text.size(), chunk_bytes, record_bytes));
    }
  }
}

}  // namespace

int main() {
  return monolith::check::run({
      {"objects become columns", objects_become_columns},
      {"texts are UTF-8", texts_are_utf8},
      {"what is not certain is odd", what_is_not_certain_is_odd},
      {"odd texts are named in their places", odd_texts_are_named_in_their_places},
      {"any other key may be ignored", any_other_key_may_be_ignored},
      {"long lines are cut, and odd", long_lines_are_cut_and_odd},
      {"a chunk ends before the line that begins beyond it",
       a_chunk_ends_before_the_line_that_begins_beyond_it},
  });
}
