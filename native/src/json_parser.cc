#include "json_parser.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "texts.h"

namespace monolith {
namespace {

constexpr int kDeepest = 64;                // lists and objects within each other, of values that are skipped
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

// Reads JSON from left to right. Every function returns whether all is well and otherwise leaves the place
// anywhere: the text is odd then.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  void skip_blanks() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) ++at_;
  }
  bool ended() const { return at_ == end_; }
  char peek() const { return at_ < end_ ? *at_ : '\0'; }
  bool take(char wanted) {
    if (peek() != wanted || ended()) return false;
    ++at_;
    return true;
  }
  bool take_word(std::string_view word) {
    if (static_cast<std::size_t>(end_ - at_) < word.size() || std::string_view(at_, word.size()) != word)
      return false;
    at_ += word.size();
    return true;
  }

  // A text without escapes, or with them; `add` is called with its parts, which are UTF-8 together.
  template <class Add>
  bool text(Add&& add) {
    if (!take('"')) return false;
    const char* begin = at_;
    while (at_ < end_) {
      const auto c = static_cast<unsigned char>(*at_);
      if (c == '"') {
        add(std::string_view(begin, static_cast<std::size_t>(at_ - begin)));
        ++at_;
        return true;
      }
      if (c == '\\') {
        add(std::string_view(begin, static_cast<std::size_t>(at_ - begin)));
        if (!escape(add)) return false;
        begin = at_;
      } else if (c < 0x20) {
        return false;
      } else if (c < 0x80) {
        ++at_;
      } else if (!skip_multibyte(c)) {
        return false;
      }
    }
    return false;
  }

  // A number as JSON writes it, which may be followed by anything.
  bool number(std::string_view& found, bool& whole) {
    const char* const begin = at_;
    if (peek() == '-') ++at_;
    if (peek() == '0') {
      ++at_;
    } else if (!digits()) {
      return false;
    }
    whole = true;
    if (peek() == '.') {
      ++at_;
      whole = false;
      if (!digits()) return false;
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      whole = false;
      if (peek() == '-' || peek() == '+') ++at_;
      if (!digits()) return false;
    }
    found = {begin, static_cast<std::size_t>(at_ - begin)};
    return true;
  }

  // Any value, which is checked and dropped.
  bool skip(int deep = 0) {
    const char c = peek();
    if (c == '"') return text([](std::string_view) {});
    if (c == 't') return take_word("true");
    if (c == 'f') return take_word("false");
    if (c == 'n') return take_word("null");
    if (c != '[' && c != '{') {
      std::string_view digits;
      bool whole = true;
      // Python refuses whole numbers of thousands of digits.
      return number(digits, whole) && digits.size() < 1000;
    }
    if (deep == kDeepest) return false;
    const char close = c == '[' ? ']' : '}';
    ++at_;
    skip_blanks();
    if (take(close)) return true;
    do {
      skip_blanks();
      if (c == '{') {
        if (!text([](std::string_view) {})) return false;
        skip_blanks();
        if (!take(':')) return false;
        skip_blanks();
      }
      if (!skip(deep + 1)) return false;
      skip_blanks();
    } while (take(','));
    return take(close);
  }

 private:
  bool digits() {
    const char* const begin = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ > begin;
  }

  // Goes past one character of several bytes; false if it is no UTF-8, or a surrogate.
  bool skip_multibyte(unsigned char first) {
    const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4 || end_ - at_ <= more) return false;
    for (int i = 1; i <= more; ++i)
      if ((static_cast<unsigned char>(at_[i]) & 0xC0) != 0x80) return false;
    const auto second = static_cast<unsigned char>(at_[1]);
    const bool too_long = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
    const bool beyond = (first == 0xED && second >= 0xA0) || (first == 0xF4 && second >= 0x90);
    if (too_long || beyond) return false;
    at_ += more + 1;
    return true;
  }

  bool hex(std::uint32_t& code) {
    if (end_ - at_ < 4) return false;
    const auto [end, error] = std::from_chars(at_, at_ + 4, code, 16);
    if (error != std::errc() || end != at_ + 4) return false;
    at_ += 4;
    return true;
  }

  template <class Add>
  bool escape(Add&& add) {
    static constexpr std::string_view kLetters = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    ++at_;  // the backslash
    if (ended()) return false;
    const char letter = *at_++;
    if (const std::size_t place = kLetters.find(letter); place != std::string_view::npos) {
      add(kMeant.substr(place, 1));
      return true;
    }
    std::uint32_t code = 0;
    if (letter != 'u' || !hex(code)) return false;
    if (code >= 0xD800 && code < 0xDC00) {  // the first of two, of which together make a character
      std::uint32_t low = 0;
      if (!take('\\') || !take('u') || !hex(low) || low < 0xDC00 || low > 0xDFFF) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xDC00 && code <= 0xDFFF) {
      return false;
    }
    char utf8[4];
    std::size_t size = 0;
    const auto put = [&](std::uint32_t byte) { utf8[size++] = static_cast<char>(byte); };
    if (code < 0x80) {
      put(code);
    } else {
      if (code < 0x800) {
        put(0xC0 | code >> 6);
      } else {
        if (code < 0x10000) {
          put(0xE0 | code >> 12);
        } else {
          put(0xF0 | code >> 18);
          put(0x80 | (code >> 12 & 0x3F));
        }
        put(0x80 | (code >> 6 & 0x3F));
      }
      put(0x80 | (code & 0x3F));
    }
    add(std::string_view(utf8, size));
    return true;
  }

  const char* at_;
  const char* const end_;
};

// Adds a number, a text or a bool to a column whose row is not closed; false if it is not of the column's
// type.
bool add_value(Scanner& scanner, const JsonColumn& wanted, ParsedColumn& column) {
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
bool add_cell(Scanner& scanner, const JsonColumn& wanted, ParsedColumn& column) {
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
    Scanner scanner(text);
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
