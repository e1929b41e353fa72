#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"
#include "csv_parser.h"

namespace {

using namespace monolith;

constexpr std::size_t kAll = 1 << 20;
const CsvDialect kPlain(',', std::nullopt, kAll);
const CsvDialect kLists(',', '|', kAll);

using Texts = std::vector<std::string>;
using Ints = std::vector<std::int64_t>;

CsvParser parser_of(const CsvDialect& dialect, const std::vector<ColumnType>& types) {
  std::vector<CsvColumn> columns;
  for (const ColumnType type : types) columns.push_back({columns.size(), type});
  return CsvParser(dialect, types.size(), columns);
}

// The strings of a column, wherever they lie in its rows.
Texts strings(const ParsedColumn& column) {
  Texts found;
  for (std::size_t i = 0; i + 1 < column.inner.size(); ++i)
    found.emplace_back(column.bytes.begin() + column.inner[i], column.bytes.begin() + column.inner[i + 1]);
  return found;
}

Texts fields_of(std::string_view record) {
  CsvFields fields(',');
  const std::string reason = fields.split(record, record.find('"') != std::string_view::npos);
  if (!reason.empty()) return {"!" + reason};
  return {fields.fields().begin(), fields.fields().end()};
}

Texts records_of(std::string_view bytes, bool last = true, std::size_t record_bytes = kAll) {
  Texts found;
  for (CsvScanner scanner(bytes, last, record_bytes); scanner.next();) found.emplace_back(scanner.record());
  return found;
}

void a_record_is_a_line_or_more_in_quotes() {
  CHECK_EQUAL(records_of("a\r\n\n\r\n\"b\nc\"\nd"), (Texts{"a\r\n", "\"b\nc\"\n", "d"}));
  CHECK_EQUAL(records_of("a\nb", false), (Texts{"a\n"}));
  CHECK_EQUAL(records_of(""), Texts{});
}

void a_quote_that_is_never_closed_costs_one_line() {
  CHECK_EQUAL(records_of("\"a\nb\nc\n"), (Texts{"\"a\n", "b\n", "c\n"}));
  CHECK_EQUAL(records_of("\"a\nb\nc\n", false), Texts{});
  CHECK_EQUAL(records_of("\"a\nb\nc\n\"\n", true, 5), (Texts{"\"a\n", "b\n", "c\n", "\"\n"}));
  CHECK_EQUAL(records_of("\"a\nbc\n\"\n", true, 5), (Texts{"\"a\n", "bc\n", "\"\n"}));
  CHECK_EQUAL(records_of("\"a\nbc\n\"\n", true, 6), (Texts{"\"a\nbc\n\"\n"}));
}

void a_line_that_is_too_long_is_cut() {
  CHECK_EQUAL(records_of("abcdefgh\nij\n", true, 4), (Texts{"abcde", "fgh\n", "ij\n"}));
  CHECK_EQUAL(records_of("abcd", false, 4), Texts{});
  CHECK_EQUAL(records_of("abcde", false, 4), (Texts{"abcde"}));
}

void fields_lose_their_quotes() {
  CHECK_EQUAL(fields_of("a,,b\r\n"), (Texts{"a", "", "b"}));
  CHECK_EQUAL(fields_of("\"a,\r\n\"\"b\"\"\",\"\",c\"d\n"), (Texts{"a,\r\n\"b\"", "", "c\"d"}));
  CHECK_EQUAL(fields_of("\"a\","), (Texts{"a", ""}));
  CHECK_EQUAL(fields_of("\"a\" ,b"), (Texts{"!',' expected after '\"'"}));
  CHECK_EQUAL(fields_of("a,\"b"), (Texts{"!unexpected end of data"}));
  CHECK_EQUAL(fields_of("\"a\"\rb"), (Texts{"!a quote is not closed"}));
}

void whole_numbers_keep_their_64_bits() {
  const CsvParser parser = parser_of(kLists, {ColumnType::kInt64});
  const auto read = [&](std::string_view text) {
    const ParsedCsv parsed = parser.parse(text, true, kAll);
    return parsed.bad.empty() ? parsed.columns[0].ints : Ints{-404};
  };
  CHECK_EQUAL(read(" 1 | -2||+3|\n"), (Ints{1, -2, 3}));
  CHECK_EQUAL(read("9223372036854775807|-9223372036854775808"), (Ints{INT64_MAX, INT64_MIN}));
  CHECK_EQUAL(read("18446744073709551615|0000000000000000000000018446744073709551615"), (Ints{-1, -1}));
  for (const char* wrong : {"x", "1.0", "1_0", "+", "-", "--1", " ", "0x1", "18446744073709551616",
                            "20000000000000000000", "30000000000000000000", "99999999999999999999",
                            "-9223372036854775809", "100000000000000000000", "1 2"})
    CHECK_EQUAL(read(wrong), Ints{-404});
}

void numbers_are_read_as_python_reads_them() {
  const CsvParser parser = parser_of(kPlain, {ColumnType::kFloat});
  const auto read = [&](std::string_view text) {
    const ParsedCsv parsed = parser.parse(text, true, kAll);
    return parsed.bad.empty() ? parsed.columns[0].floats.at(0) : -404.f;
  };
  CHECK_EQUAL(read("0.1"), 0.1f);
  CHECK_EQUAL(read(" +1. "), 1.f);
  CHECK_EQUAL(read("-.5E+1"), -5.f);
  CHECK_EQUAL(read("-Inf"), -INFINITY);
  CHECK(std::isnan(read("nAn")));
  CHECK(std::signbit(read("-nan")));
  CHECK_EQUAL(read("1e300"), INFINITY);  // a double, and no float
  CHECK_EQUAL(read("-1e400"), -INFINITY);
  CHECK_EQUAL(read("1e-400"), 0.f);
  CHECK_EQUAL(read("0.0001e99999999999999999999"), INFINITY);
  CHECK_EQUAL(read("0." + std::string(50, '0') + "1e400"), INFINITY);
  CHECK_EQUAL(read("1" + std::string(50, '0') + "e-400"), 0.f);
  CHECK_EQUAL(read("1000000e-99999999999999999999"), 0.f);
  CHECK_EQUAL(read("0e999"), 0.f);
  CHECK_EQUAL(read(std::string(400, '9')), INFINITY);
  CHECK_EQUAL(read("." + std::string(400, '0') + "1"), 0.f);
  for (const char* wrong :
       {"x", ".", "-", "1e", "1e+", "e1", "1.2.3", "infinity", "nan(1)", "0x1p3", "1 2", "1_0", "--1", "1f"})
    CHECK_EQUAL(read(wrong), -404.f);
}

void a_bad_record_leaves_nothing_behind() {
  const CsvParser parser = parser_of(kLists, {ColumnType::kBytes, ColumnType::kInt64, ColumnType::kFloat});
  const ParsedCsv parsed = parser.parse("a|b,1,1\nc,2|3,x\nd,4|y,1\ne,5\nf,6|7,\n", true, kAll);
  CHECK_EQUAL(parsed.records, 2u);
  CHECK_EQUAL(strings(parsed.columns[0]), (Texts{"a", "b", "f"}));
  CHECK_EQUAL(parsed.columns[0].splits, (Ints{0, 2, 3}));
  CHECK_EQUAL(parsed.columns[1].ints, (Ints{1, 6, 7}));
  CHECK_EQUAL(parsed.columns[1].splits, (Ints{0, 1, 3}));
  CHECK_EQUAL(parsed.columns[2].splits, (Ints{0, 1, 1}));
  CHECK_EQUAL(parsed.bad.size(), 3u);
  CHECK_EQUAL(parsed.bad[0].reason, "is not a number");
  CHECK_EQUAL(*parsed.bad[0].column, 2u);
  CHECK_EQUAL(parsed.bad[0].value, "x");
  CHECK_EQUAL(*parsed.bad[1].column, 1u);
  CHECK_EQUAL(parsed.bad[1].begin, 16u);
  CHECK_EQUAL(parsed.bad[1].size, 8u);
  CHECK_EQUAL(parsed.bad[2].reason, "2 fields instead of 3");
  CHECK(!parsed.bad[2].column);
}

void what_is_not_read_is_not_judged() {
  const CsvParser parser(kPlain, 3, {{1, ColumnType::kInt64}});
  const ParsedCsv parsed = parser.parse("x,1,y\nx,2\n", true, kAll);
  CHECK_EQUAL(parsed.columns[0].ints, Ints{1});
  CHECK_EQUAL(parsed.bad.size(), 1u);
}

void a_chunk_ends_before_the_record_that_begins_beyond_it() {
  const CsvParser parser = parser_of(kPlain, {ColumnType::kInt64});
  const std::string_view text = "1\n2\n\n3\n\n";
  const ParsedCsv two = parser.parse(text, true, 3);
  CHECK(two.whole);
  CHECK_EQUAL(two.columns[0].ints, (Ints{1, 2}));
  CHECK_EQUAL(two.next, 5u);
  CHECK_EQUAL(parser.parse(text, true, 2).next, 2u);
  const ParsedCsv rest = parser.parse(text.substr(5), true, 3);
  CHECK_EQUAL(rest.columns[0].ints, Ints{3});
  CHECK_EQUAL(rest.next, 2u);  // the empty line is nobody's
}

void too_few_bytes_are_asked_for_again() {
  const CsvParser parser = parser_of(kPlain, {ColumnType::kInt64});
  const ParsedCsv within = parser.parse("1\n2\n", false, 10);
  CHECK(!within.whole);
  CHECK_EQUAL(within.next, 0u);
  CHECK(within.columns.empty());
  const ParsedCsv blank = parser.parse("\n\r\n1", false, 1);
  CHECK(!blank.whole);
  CHECK_EQUAL(blank.next, 3u);
}

void types_are_the_narrowest_that_fit() {
  CsvSniffer sniffer(kLists, 4, 3);
  const std::string_view text = "1,1,a,\n1\n2|3,.5,4,\n\n9,1,1,\nx,x,x,x\n";
  const std::size_t seen = sniffer.take(text.substr(0, 12), false);
  CHECK_EQUAL(seen, 9u);
  CHECK(!sniffer.done());
  sniffer.take(text.substr(seen), true);
  CHECK(sniffer.done());
  CHECK(sniffer.types() ==
        (std::vector{ColumnType::kInt64, ColumnType::kFloat, ColumnType::kBytes, ColumnType::kBytes}));
}

void what_makes_no_sense_is_refused() {
  CHECK_THROWS(std::invalid_argument, "cannot separate", CsvDialect('"', std::nullopt, 1));
  CHECK_THROWS(std::invalid_argument, "cannot separate", CsvDialect(',', '\n', 1));
  CHECK_THROWS(std::invalid_argument, "one character", CsvDialect(',', ',', 1));
  CHECK_THROWS(std::invalid_argument, "record_bytes", CsvDialect(',', '|', 0));
  CHECK_THROWS(std::invalid_argument, "positions", CsvParser(kPlain, 1, {{1, ColumnType::kInt64}}));
  CHECK_THROWS(std::invalid_argument, "positions",
               CsvParser(kPlain, 2, {{1, ColumnType::kInt64}, {1, ColumnType::kInt64}}));
}

// Everything a file says, read in chunks from a window that grows by `step` bytes.
struct Read {
  Ints ints;
  Texts texts;
  std::vector<std::pair<std::size_t, std::string>> bad;
  bool operator==(const Read&) const = default;
};

Read read(const CsvDialect& dialect, std::string_view text, std::size_t step, std::size_t chunk_bytes) {
  const CsvParser parser = parser_of(dialect, {ColumnType::kInt64, ColumnType::kBytes});
  Read found;
  std::size_t begin = 0, end = 0;
  while (true) {
    const std::string window(text.substr(begin, end - begin));  // of its own memory, for the sanitizer
    const ParsedCsv parsed = parser.parse(window, end == text.size(), chunk_bytes);
    // Whoever looks for the end alone finds the same, and the bytes up to there parse to the same.
    const ChunkEnd found_end = find_csv_chunk_end(dialect, window, end == text.size(), chunk_bytes);
    CHECK_EQUAL(found_end.whole, parsed.whole);
    CHECK_EQUAL(found_end.next, parsed.next);
    if (parsed.whole) {
      const ParsedCsv cut = parser.parse(window.substr(0, parsed.next), true, parsed.next);
      CHECK_EQUAL(cut.records, parsed.records);
      CHECK_EQUAL(cut.columns[0].ints, parsed.columns[0].ints);
      CHECK_EQUAL(cut.columns[1].bytes, parsed.columns[1].bytes);
      CHECK_EQUAL(cut.bad.size(), parsed.bad.size());
    }
    if (!parsed.whole) {
      begin += parsed.next;
      end = std::min(end + step, text.size());
      continue;
    }
    if (parsed.records == 0 && parsed.bad.empty()) return found;
    found.ints.insert(found.ints.end(), parsed.columns[0].ints.begin(), parsed.columns[0].ints.end());
    for (const std::string& one : strings(parsed.columns[1])) found.texts.push_back(one);
    for (const BadCsvRecord& bad : parsed.bad) found.bad.emplace_back(begin + bad.begin, bad.reason);
    begin += parsed.next;
  }
}

void where_a_window_ends_makes_no_difference() {
  std::mt19937_64 random(7);
  constexpr std::string_view kParts[] = {"1",   ",",    "\n", "\r\n", "\"",    "a|b",      "\"x\ny\"",
                                         "2,b", "\n\n", "\r", "\"\"", "3,c\n", "4,\"d\"\n"};
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (int part = 0; part < 20; ++part) text += kParts[random() % std::size(kParts)];
    const std::size_t record_bytes = round % 3 == 0 ? 6 : kAll;
    const CsvDialect dialect(',', '|', record_bytes);
    const Read whole = read(dialect, text, text.size(), kAll);
    for (std::size_t step = 1; step < 8; ++step)
      for (const std::size_t chunk_bytes : {1, 5, 17}) CHECK(read(dialect, text, step, chunk_bytes) == whole);
  }
}

void texts_are_one_record_each() {
  const std::vector<std::string_view> texts = {"1,a\r\n", "", "2,b\n3,c", "4,\"d", "x,e", "5,\"f,\"", "\n"};
  const ParsedCsv parsed = parser_of(kPlain, {ColumnType::kInt64, ColumnType::kBytes}).parse_texts(texts);
  CHECK_EQUAL(parsed.columns[0].ints, (Ints{1, 5}));
  CHECK_EQUAL(strings(parsed.columns[1]), (Texts{"a", "f,"}));
  std::vector<std::size_t> bad;
  for (const BadCsvRecord& one : parsed.bad) bad.push_back(one.begin);
  CHECK_EQUAL(bad, (std::vector<std::size_t>{1, 2, 3, 4, 6}));
  CHECK_EQUAL(parsed.bad[3].column, std::optional<std::size_t>(0));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"a record is a line, or more in quotes", a_record_is_a_line_or_more_in_quotes},
      {"a quote that is never closed costs one line", a_quote_that_is_never_closed_costs_one_line},
      {"a line that is too long is cut", a_line_that_is_too_long_is_cut},
      {"fields lose their quotes", fields_lose_their_quotes},
      {"whole numbers keep their 64 bits", whole_numbers_keep_their_64_bits},
      {"numbers are read as Python reads them", numbers_are_read_as_python_reads_them},
      {"a bad record leaves nothing behind", a_bad_record_leaves_nothing_behind},
      {"what is not read is not judged", what_is_not_read_is_not_judged},
      {"a chunk ends before the record that begins beyond it",
       a_chunk_ends_before_the_record_that_begins_beyond_it},
      {"too few bytes are asked for again", too_few_bytes_are_asked_for_again},
      {"types are the narrowest that fit", types_are_the_narrowest_that_fit},
      {"what makes no sense is refused", what_makes_no_sense_is_refused},
      {"texts are one record each", texts_are_one_record_each},
      {"where a window ends makes no difference", where_a_window_ends_makes_no_difference},
  });
}
