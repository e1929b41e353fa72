#include "csv_parser.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "texts.h"

namespace monolith {
namespace {

constexpr std::size_t kShown = 40;  // bytes of a wrong value
constexpr std::string_view kLineEnds = "\r\n";

// A value that cannot be read.
struct Wrong {
  std::string_view reason, value;  // no reason: all is well
};

// Adds the values of a field to a column whose row is not closed yet.
Wrong add_field(ParsedColumn& column, std::string_view field, std::optional<char> separator) {
  Wrong wrong;
  const auto add_numbers = [&](auto& values, auto read) {
    each_value(field, separator, [&](std::string_view value) {
      wrong.value = strip(value);
      wrong.reason = read(wrong.value, values.emplace_back());
      return wrong.reason.empty();
    });
  };
  switch (column.type) {
    case ColumnType::kInt64:
      add_numbers(column.ints, read_whole);
      break;
    case ColumnType::kFloat:
      add_numbers(column.floats, read_number);
      break;
    case ColumnType::kBytes:
      each_value(field, separator, [&](std::string_view value) {
        column.bytes.insert(column.bytes.end(), value.begin(), value.end());
        column.inner.push_back(static_cast<std::int64_t>(column.bytes.size()));
        return true;
      });
  }
  return wrong;
}

}  // namespace

CsvDialect::CsvDialect(char delimiter, std::optional<char> separator, std::size_t record_bytes)
    : delimiter(delimiter), separator(separator), record_bytes(record_bytes) {
  constexpr std::string_view kTaken = "\"\r\n";
  if (kTaken.find(delimiter) != std::string_view::npos ||
      (separator && kTaken.find(*separator) != std::string_view::npos))
    throw std::invalid_argument("csv: a quote or line end cannot separate");
  if (delimiter == separator)
    throw std::invalid_argument("csv: one character cannot separate fields and values");
  if (record_bytes < 1 || record_bytes == std::numeric_limits<std::size_t>::max())
    throw std::invalid_argument("csv: record_bytes must be at least 1, and less than the largest number");
}

bool CsvScanner::next() {
  while (place_ < bytes_.size()) {
    const std::size_t size = measure();
    if (size == 0) return false;
    record_ = bytes_.substr(place_, size);
    place_ += size;
    if (record_.find_first_not_of(kLineEnds) != std::string_view::npos) return true;
  }
  return false;
}

// The size of the record at place_, 0 if it may continue after these bytes.
std::size_t CsvScanner::measure() {
  const std::string_view rest = bytes_.substr(place_);
  std::size_t end = 0, first_line = 0;
  bool open = false;
  quoted_ = false;
  for (;;) {
    std::string_view line = rest.substr(end, record_bytes_ + 1);
    const std::size_t newline = line.find('\n');
    const bool ends = newline != std::string_view::npos || line.size() > record_bytes_;
    if (!ends && !last_) return 0;
    if (newline != std::string_view::npos) line = line.substr(0, newline + 1);
    end += line.size();
    if (first_line == 0 && newline != std::string_view::npos) first_line = end;
    if (line.find('"') != std::string_view::npos) {
      quoted_ = true;
      open ^= std::ranges::count(line, '"') % 2 == 1;
    }
    if (!open) return end;
    // A quote that is never closed. The line is bad, but the next may be a good one.
    if (!ends || end > record_bytes_) return first_line != 0 ? first_line : end;
  }
}

std::string CsvFields::split(std::string_view record, bool quoted) {
  fields_.clear();
  const std::string_view text = record.substr(0, record.find_last_not_of(kLineEnds) + 1);
  if (quoted) return split_quoted(text);
  for (std::size_t begin = 0;;) {
    const std::size_t end = find_byte(text, delimiter_, begin);
    fields_.push_back(text.substr(begin, end - begin));
    if (end == text.size()) return {};
    begin = end + 1;
  }
}

std::string CsvFields::split_quoted(std::string_view text) {
  const auto next_end = [&](std::size_t at) {
    while (at < text.size() && text[at] != delimiter_ && text[at] != '\r' && text[at] != '\n') ++at;
    return at;
  };
  unquoted_.clear();
  unquoted_.reserve(text.size());  // so that it stays where it is
  bool lines = false;
  for (std::size_t at = 0;;) {
    const std::size_t begin = unquoted_.size();
    if (at < text.size() && text[at] == '"') {
      do {  // up to a quote that is not one of two
        const std::size_t quote = text.find('"', ++at);
        if (quote == std::string_view::npos) return "unexpected end of data";
        unquoted_ += text.substr(at, quote - at);
        at = quote + 1;
        if (at < text.size() && text[at] == '"') unquoted_ += '"';
      } while (at < text.size() && text[at] == '"');
      if (at != next_end(at)) return std::string("'") + delimiter_ + "' expected after '\"'";
    } else {
      const std::size_t end = next_end(at);
      unquoted_ += text.substr(at, end - at);
      at = end;
    }
    fields_.push_back(std::string_view(unquoted_).substr(begin));
    if (at == text.size()) break;
    lines |= text[at++] != delimiter_;
  }
  return lines ? "a quote is not closed" : "";
}

CsvSniffer::CsvSniffer(CsvDialect dialect, std::size_t fields, std::size_t rows)
    : dialect_(dialect), rows_left_(rows), sights_(fields, kNothing) {}

std::size_t CsvSniffer::take(std::string_view bytes, bool last) {
  CsvScanner scanner(bytes, last, dialect_.record_bytes);
  CsvFields fields(dialect_.delimiter);
  while (!done() && scanner.next()) {
    if (!fields.split(scanner.record(), scanner.quoted()).empty()) continue;
    if (fields.fields().size() != sights_.size()) continue;
    for (std::size_t i = 0; i < sights_.size(); ++i) see(sights_[i], fields.fields()[i]);
    --rows_left_;
  }
  return scanner.place();
}

// A whole number is a number too, so a column only ever widens.
void CsvSniffer::see(Sight& sight, std::string_view field) const {
  each_value(field, dialect_.separator, [&](std::string_view value) {
    value = strip(value);
    std::int64_t whole = 0;
    float number = 0;
    if (sight <= kWhole) sight = read_whole(value, whole).empty() ? kWhole : kNumber;
    if (sight == kNumber && !read_number(value, number).empty()) sight = kText;
    return sight != kText;
  });
}

std::vector<ColumnType> CsvSniffer::types() const {
  std::vector<ColumnType> types;
  types.reserve(sights_.size());
  for (const Sight sight : sights_)
    types.push_back(sight == kWhole    ? ColumnType::kInt64
                    : sight == kNumber ? ColumnType::kFloat
                                       : ColumnType::kBytes);
  return types;
}

CsvParser::CsvParser(CsvDialect dialect, std::size_t fields, std::vector<CsvColumn> columns)
    : dialect_(dialect), fields_(fields), columns_(std::move(columns)) {
  for (std::size_t i = 0; i < columns_.size(); ++i)
    if (columns_[i].position >= fields_ || (i > 0 && columns_[i].position <= columns_[i - 1].position))
      throw std::invalid_argument("csv: positions of columns must rise, and be less than the fields");
}

ChunkEnd find_csv_chunk_end(const CsvDialect& dialect, std::string_view bytes, bool last,
                            std::size_t chunk_bytes) {
  CsvScanner scanner(bytes, last, dialect.record_bytes);
  std::size_t end = 0;  // of the last record
  while (scanner.next()) {
    if (scanner.begin() >= chunk_bytes && end > 0) return {true, scanner.begin()};
    end = scanner.place();
  }
  if (last) return {true, end};
  if (end > 0 && scanner.place() >= chunk_bytes) return {true, scanner.place()};
  return {false, end > 0 ? 0 : scanner.place()};
}

ParsedCsv CsvParser::no_records() const {
  ParsedCsv parsed;
  for (const CsvColumn& column : columns_) parsed.columns.push_back(ParsedColumn::without_rows(column.type));
  return parsed;
}

// Adds a record, or what is wrong with it, which then begins at `begin`.
void CsvParser::add(ParsedCsv& parsed, CsvFields& fields, std::size_t begin, std::string_view record,
                    bool quoted) const {
  const auto refuse = [&](std::string reason, std::optional<std::size_t> column = {},
                          std::string_view value = {}) {
    parsed.bad.push_back(
        {begin, record.size(), std::move(reason), column, std::string(value.substr(0, kShown))});
  };
  if (record.size() > dialect_.record_bytes)
    return refuse("longer than " + std::to_string(dialect_.record_bytes) + " bytes, cut there");
  if (std::string reason = fields.split(record, quoted); !reason.empty()) return refuse(std::move(reason));
  if (const std::size_t found = fields.fields().size(); found != fields_)
    return refuse(std::to_string(found) + " fields instead of " + std::to_string(fields_));
  Wrong wrong;
  std::size_t i = 0;
  for (; i < columns_.size() && wrong.reason.empty(); ++i)
    wrong = add_field(parsed.columns[i], fields.fields()[columns_[i].position], dialect_.separator);
  if (!wrong.reason.empty()) {
    refuse(std::string(wrong.reason), i - 1, wrong.value);
    for (ParsedColumn& column : parsed.columns) column.drop_row();
    return;
  }
  for (ParsedColumn& column : parsed.columns) column.close_row();
  ++parsed.records;
}

ParsedCsv CsvParser::parse_texts(std::span<const std::string_view> texts) const {
  ParsedCsv parsed = no_records();
  parsed.whole = true;
  CsvFields fields(dialect_.delimiter);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::string_view record = texts[i].substr(0, texts[i].find_last_not_of(kLineEnds) + 1);
    const std::ptrdiff_t quotes = std::ranges::count(record, '"');
    const std::string_view found = record.empty()                                ? "nothing"
                                   : record.find('\n') != std::string_view::npos ? "several lines"
                                   : quotes % 2 == 1                             ? "an open quote"
                                                                                 : "";
    if (found.empty())
      add(parsed, fields, i, record, quotes > 0);
    else
      parsed.bad.push_back({i, record.size(), "expected one line, found " + std::string(found), {}, {}});
  }
  return parsed;
}

ParsedCsv CsvParser::parse(std::string_view bytes, bool last, std::size_t chunk_bytes) const {
  ParsedCsv parsed = no_records();
  CsvScanner scanner(bytes, last, dialect_.record_bytes);
  CsvFields fields(dialect_.delimiter);
  const auto any = [&] { return parsed.records > 0 || !parsed.bad.empty(); };
  std::size_t end = 0;  // of the last record
  for (; scanner.next(); end = scanner.place()) {
    if (scanner.begin() >= chunk_bytes && any()) {
      parsed.whole = true;
      parsed.next = scanner.begin();
      return parsed;
    }
    add(parsed, fields, scanner.begin(), scanner.record(), scanner.quoted());
  }
  if (last || (any() && scanner.place() >= chunk_bytes)) {
    parsed.whole = true;
    parsed.next = last ? end : scanner.place();
    return parsed;
  }
  ParsedCsv more;
  more.next = any() ? 0 : scanner.place();
  return more;
}

}  // namespace monolith
