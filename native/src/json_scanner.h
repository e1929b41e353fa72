// A scanner of JSON: texts, numbers and words from left to right, in place.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <system_error>

namespace monolith {

// Reads JSON from left to right. Every function returns whether all is well and otherwise leaves the place
// anywhere: the text is odd then.
class JsonScanner {
 public:
  explicit JsonScanner(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

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

  static constexpr int kDeepest = 64;  // lists and objects within each other, of values that are skipped

  const char* at_;
  const char* const end_;
};

}  // namespace monolith
