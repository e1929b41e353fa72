#include "json_parser.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "json_scanner.h"
#include "texts.h"

namespace monolith {
namespace {

constexpr std::size_t kCertainDigits = 18;  // as many always fit into 64 bits

// The lines of some bytes that are more than blanks. One of more than `most` bytes comes in pieces.
class LineScanner {
 public:
  LineScanner(std::string_view bytes, bool last, std::size_t most)
      : bytes_(bytes), last_(last), most_(most) {}

  // Goes to the next line; false when there is none, or when it may continue after these bytes.
  bool next() {
    while (place_ < bytes_.size()) {
      const std::string_view rest = bytes_.substr(place_, most_);
      const std::size_t newline = find_byte(rest, '\n');
      if (newline == rest.size() && rest.size() < most_ && !last_) return false;
      line_ = rest.substr(0, std::min(newline + 1, rest.size()));
      place_ += line_.size();
      if (!strip(line_).empty()) return true;
    }
    return false;
  }

  std::string_view line() const { return line_; }  // with its line end
  std::size_t begin() const { return place_ - line_.size(); }
  std::size_t place() const { return place_; }  // the end of all that was found, blank lines included

 private:
  const std::string_view bytes_;
  const bool last_;
  const std::size_t most_;
  std::string_view line_;
  std::size_t place_ = 0;
};

// Adds a number, a text or a bool to a column whose row is not closed; false if it is not of the column's
// type.
bool add_value(JsonScanner& scanner, const JsonColumn& wanted, ParsedColumn& column) {
  const char c = scanner.peek();
  if (c == '"') {
    if (wanted.type != ColumnType::kBytes) return false;
    if (!scanner.text([&](std::string_view part) {
          column.bytes.insert(column.bytes.end(), part.begin(), part.end());
        }))
      return false;
    column.inner.push_back(static_cast<std::int64_t>(column.bytes.size()));
    return true;
  }
  if (c == 't' || c == 'f') {
    if (wanted.type == ColumnType::kBytes || !scanner.take_word(c == 't' ? "true" : "false")) return false;
    if (wanted.type == ColumnType::kInt64)
      column.ints.push_back(c == 't');
    else
      column.floats.push_back(c == 't' ? 1.0f : 0.0f);
    return true;
  }
  std::string_view digits;
  bool whole = true;
  if (!scanner.number(digits, whole)) return false;
  switch (wanted.type) {
    case ColumnType::kInt64:
      return whole && read_whole(digits, column.ints.emplace_back()).empty();
    case ColumnType::kFloat: {
      double number = 0;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
      if (error != std::errc() || std::abs(number) > std::numeric_limits<float>::max()) return false;
      if (whole && number == 0) number = 0;  // "-0" is a whole number, which has no sign
      column.floats.push_back(static_cast<float>(number));
      return true;
    }
    case ColumnType::kBytes:
      if (!wanted.whole_as_text || !whole || digits.size() > kCertainDigits || digits == "-0") return false;
      column.bytes.insert(column.bytes.end(), digits.begin(), digits.end());
      column.inner.push_back(static_cast<std::int64_t>(column.bytes.size()));
      return true;
  }
  return false;
}

// Adds what one key has: a value, a list of them, or none.
bool add_cell(JsonScanner& scanner, const JsonColumn& wanted, ParsedColumn& column) {
  if (scanner.peek() == 'n') return scanner.take_word("null");
  if (!scanner.take('[')) return add_value(scanner, wanted, column);
  scanner.skip_blanks();
  if (scanner.take(']')) return true;
  do {
    scanner.skip_blanks();
    if (scanner.peek() == 'n') {  // numbers keep their position in a list
      if (!scanner.take_word("null")) return false;
      if (wanted.type == ColumnType::kFloat) column.floats.push_back(std::numeric_limits<float>::quiet_NaN());
    } else if (!add_value(scanner, wanted, column)) {
      return false;
    }
    scanner.skip_blanks();
  } while (scanner.take(','));
  return scanner.take(']');
}

}  // namespace

// Collects rows of one call.
class JsonParser::Rows {
 public:
  explicit Rows(const JsonParser& parser)
      : parser_(parser), last_row_(parser.columns_.size(), 0), follows_(parser.keys_.size() + 1, 0) {
    for (const JsonColumn& column : parser.columns_)
      parsed.columns.push_back(ParsedColumn::without_rows(column.type));
  }

  void add(std::string_view text, std::size_t begin, bool odd = false) {
    ++row_;
    if (!odd && read(text)) {
      for (ParsedColumn& column : parsed.columns) column.close_row();
      ++parsed.records;
    } else {
      for (ParsedColumn& column : parsed.columns) column.drop_row();
      parsed.odd.push_back({parsed.records, begin, text.size()});
    }
  }

  ParsedJson parsed;

 private:
  bool read(std::string_view text) {
    JsonScanner scanner(text);
    scanner.skip_blanks();
    if (!scanner.take('{')) return false;
    scanner.skip_blanks();
    if (!scanner.take('}')) {
      std::size_t before = parser_.keys_.size();  // as if another key were before the first
      do {
        scanner.skip_blanks();
        std::string_view key;
        int parts = 0;
        if (!scanner.text([&](std::string_view part) { key = part, ++parts; }) || parts > 1) return false;
        scanner.skip_blanks();
        if (!scanner.take(':')) return false;
        scanner.skip_blanks();
        // Objects of one origin have their keys in one order, so the key that came next the last time is
        // tried first.
        std::size_t place = follows_[before];
        if (place >= parser_.keys_.size() || parser_.keys_[place] != key) place = parser_.find(key);
        if (place == kUnknown) {
          if (!parser_.any_key_ || !scanner.skip()) return false;
        } else {
          follows_[before] = place;
          before = place;
          if (place >= parser_.columns_.size()) {
            if (!scanner.skip()) return false;
          } else {
            if (std::exchange(last_row_[place], row_) == row_) return false;  // the key comes twice
            if (!add_cell(scanner, parser_.columns_[place], parsed.columns[place])) return false;
          }
        }
        scanner.skip_blanks();
      } while (scanner.take(','));
      if (!scanner.take('}')) return false;
    }
    scanner.skip_blanks();
    return scanner.ended();
  }

  const JsonParser& parser_;
  std::size_t row_ = 0;                // of all that were tried, from 1 on
  std::vector<std::size_t> last_row_;  // by column: the row that had it last
  std::vector<std::size_t> follows_;   // by key: which one came after it
};

JsonParser::JsonParser(std::vector<JsonColumn> columns, const std::vector<std::string>& others, bool any_key)
    : columns_(std::move(columns)), any_key_(any_key) {
  for (const JsonColumn& column : columns_) keys_.push_back(column.name);
  keys_.insert(keys_.end(), others.begin(), others.end());
  for (std::size_t i = 0; i < keys_.size(); ++i)
    if (!places_.emplace(keys_[i], i).second) throw std::invalid_argument("json: a key is named twice");
}

std::size_t JsonParser::find(std::string_view key) const {
  const auto found = places_.find(key);
  return found == places_.end() ? kUnknown : found->second;
}

ParsedJson JsonParser::parse_lines(std::string_view bytes, std::size_t record_bytes) const {
  Rows rows(*this);
  for (LineScanner lines(bytes, true, record_bytes + 1); lines.next();)
    rows.add(lines.line(), lines.begin(), lines.line().size() > record_bytes);
  return std::move(rows.parsed);
}

ParsedJson JsonParser::parse_texts(std::span<const std::string_view> texts) const {
  Rows rows(*this);
  for (std::size_t i = 0; i < texts.size(); ++i) rows.add(texts[i], i);
  return std::move(rows.parsed);
}

ChunkEnd find_lines_chunk_end(std::string_view bytes, bool last, std::size_t chunk_bytes,
                              std::size_t record_bytes) {
  LineScanner lines(bytes, last, record_bytes + 1);
  std::size_t end = 0;  // of the last line
  while (lines.next()) {
    if (lines.begin() >= chunk_bytes && end > 0) return {true, lines.begin()};
    end = lines.place();
  }
  if (last) return {true, end};
  return {false, end > 0 ? 0 : lines.place()};
}

}  // namespace monolith
