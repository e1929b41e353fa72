#include "texts.h"

#include <charconv>
#include <cmath>
#include <limits>

namespace monolith {
namespace {

constexpr std::string_view kNotWhole = "is not a whole number";
constexpr std::string_view kTooLarge = "does not fit into 64 bits";
constexpr std::string_view kNotNumber = "is not a number";

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Whether these are eight digits, and what they make.
bool read_eight_digits(const char* text, std::uint64_t& number) {
  std::uint64_t eight = load_eight(text);
  if ((((eight + 0x4646464646464646) | (eight - 0x3030303030303030)) & 0x8080808080808080) != 0) return false;
  eight -= 0x3030303030303030;
  eight = eight * 10 + (eight >> 8);  // pairs, then all four of them
  number = ((eight & 0x000000ff000000ff) * 0x000f424000000064 +
            (eight >> 16 & 0x000000ff000000ff) * 0x0000271000000001) >>
           32;
  return true;
}

}  // namespace

std::string_view read_whole(std::string_view text, std::int64_t& value) {
  constexpr std::uint64_t kLeast20 = 10'000'000'000'000'000'000u;  // of 20 digits
  const bool negative = !text.empty() && text.front() == '-';
  if (negative || (!text.empty() && text.front() == '+')) text.remove_prefix(1);
  if (text.empty()) return kNotWhole;
  std::uint64_t number = 0;  // if it wraps, that is found below
  std::size_t at = 0;
  if constexpr (kEightAtOnce) {
    for (std::uint64_t eight = 0; text.size() - at >= 8; at += 8) {
      if (!read_eight_digits(text.data() + at, eight)) return kNotWhole;
      number = number * 100'000'000 + eight;
    }
  }
  for (; at < text.size(); ++at) {
    if (!is_digit(text[at])) return kNotWhole;
    number = number * 10 + static_cast<std::uint64_t>(text[at] - '0');
  }
  if (text.size() > 19) {
    const std::string_view digits = text.substr(std::min(text.find_first_not_of('0'), text.size()));
    if (digits.size() > 20) return kTooLarge;
    if (digits.size() == 20 && (digits.front() > '1' || number < kLeast20)) return kTooLarge;
  }
  if (negative && number > std::uint64_t{1} << 63) return kTooLarge;
  value = static_cast<std::int64_t>(negative ? 0 - number : number);
  return {};
}

namespace {

bool equals_ignoring_case(std::string_view text, std::string_view lower) {
  return std::ranges::equal(text, lower, [](char a, char b) { return (a | 0x20) == b; });
}

// Whether a number that no double holds is too large, and not too small: where its first digit stands.
bool is_huge(std::string_view mantissa, std::string_view exponent) {
  const std::size_t point = std::min(mantissa.find('.'), mantissa.size());
  const std::size_t first = mantissa.find_first_not_of("0.");
  if (first == std::string_view::npos) return false;
  const bool negative = !exponent.empty() && exponent.front() == '-';
  if (!exponent.empty() && !is_digit(exponent.front())) exponent.remove_prefix(1);
  std::int64_t power = 0;
  for (const char c : exponent) power = std::min<std::int64_t>(power * 10 + (c - '0'), 1'000'000'000'000);
  return (negative ? -power : power) + static_cast<std::int64_t>(point) - static_cast<std::int64_t>(first) >
         0;
}

}  // namespace

std::string_view read_number(std::string_view text, float& value) {
  const bool negative = !text.empty() && text.front() == '-';
  if (negative || (!text.empty() && text.front() == '+')) text.remove_prefix(1);
  const auto signed_value = [negative](double number) {
    return static_cast<float>(std::copysign(number, negative ? -1.0 : 1.0));
  };
  if (equals_ignoring_case(text, "inf")) {
    value = signed_value(std::numeric_limits<double>::infinity());
    return {};
  }
  if (equals_ignoring_case(text, "nan")) {
    value = signed_value(std::numeric_limits<double>::quiet_NaN());
    return {};
  }
  // What std::from_chars takes is near what we do, and not the same.
  std::size_t at = 0, digits = 0;
  for (; at < text.size() && is_digit(text[at]); ++at) ++digits;
  if (at < text.size() && text[at] == '.') ++at;
  for (; at < text.size() && is_digit(text[at]); ++at) ++digits;
  if (digits == 0) return kNotNumber;
  const std::size_t mantissa = at;
  if (at < text.size() && (text[at] | 0x20) == 'e') {
    ++at;
    if (at < text.size() && (text[at] == '-' || text[at] == '+')) ++at;
    const std::size_t power = at;
    while (at < text.size() && is_digit(text[at])) ++at;
    if (at == power) return kNotNumber;
  }
  if (at != text.size()) return kNotNumber;
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc::result_out_of_range)
    number =
        is_huge(text.substr(0, mantissa), text.substr(std::min(mantissa + 1, text.size()))) ? INFINITY : 0.0;
  else if (error != std::errc() || end != text.data() + text.size())
    return kNotNumber;
  value = signed_value(number);
  return {};
}

}  // namespace monolith
