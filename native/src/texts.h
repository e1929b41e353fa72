// Texts that hold values: numbers, and lists with a separator between their items.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace monolith {

// As Python strips bytes.
inline bool is_blank(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

inline std::string_view strip(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// Fields are short, so that eight bytes at once beat a call to the best of loops.
inline constexpr bool kEightAtOnce = std::endian::native == std::endian::little;

inline std::uint64_t load_eight(const char* from) {
  std::uint64_t eight;
  std::memcpy(&eight, from, sizeof eight);
  return eight;
}

// The first place of `wanted` from `begin` on, or the size of the text.
inline std::size_t find_byte(std::string_view text, char wanted, std::size_t begin = 0) {
  constexpr std::uint64_t kOnes = 0x0101010101010101, kHigh = 0x8080808080808080;
  if constexpr (kEightAtOnce) {
    const std::uint64_t mask = kOnes * static_cast<std::uint8_t>(wanted);
    for (; text.size() - begin >= 8; begin += 8) {
      const std::uint64_t eight = load_eight(text.data() + begin) ^ mask;
      if (const std::uint64_t zeros = (eight - kOnes) & ~eight & kHigh; zeros != 0)
        return begin + static_cast<std::size_t>(std::countr_zero(zeros)) / 8;
    }
  }
  while (begin < text.size() && text[begin] != wanted) ++begin;
  return begin;
}

// Reads a stripped integer; returns what is wrong with it, or nothing.
std::string_view read_whole(std::string_view text, std::int64_t& value);

// Reads a stripped number as Python reads a float; returns what is wrong with it, or nothing.
std::string_view read_number(std::string_view text, float& value);

// Calls `take` with each value of a field, as long as it returns true.
template <class Take>
void each_value(std::string_view field, std::optional<char> separator, Take&& take) {
  if (!separator) {
    if (!field.empty()) take(field);
    return;
  }
  while (!field.empty()) {
    const std::size_t end = find_byte(field, *separator);
    if (end > 0 && !take(field.substr(0, end))) return;
    field.remove_prefix(std::min(end + 1, field.size()));
  }
}

}  // namespace monolith
