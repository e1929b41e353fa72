#include "row_pack.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string_view>

#include "texts.h"

namespace monolith {
namespace {

const SourceColumn& block_at(std::span<const SourceColumn* const> column,
                             std::span<const std::int32_t> block_of, std::size_t i) {
  return *column[block_of.empty() ? 0 : static_cast<std::size_t>(block_of[i])];
}

std::string_view text_at(const SourceColumn& block, std::size_t at) {
  const auto begin = static_cast<std::size_t>(block.inner[at]),
             end = static_cast<std::size_t>(block.inner[at + 1]);
  return {reinterpret_cast<const char*>(block.bytes.data()) + begin, end - begin};
}

// The numbers of some texts; false if one is none.
bool read_texts(const SourceColumn& block, std::size_t begin, std::size_t end, std::optional<char> separator,
                std::vector<float>& out) {
  out.clear();
  bool fine = true;
  for (std::size_t at = begin; at < end && fine; ++at)
    each_value(text_at(block, at), separator, [&](std::string_view item) {
      return fine = read_number(strip(item), out.emplace_back()).empty();
    });
  return fine;
}

bool is_digits(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// The second that a number is; none if it is no time of the unit.
std::optional<std::int64_t> second_of(const TimePlan& plan, std::int64_t per_second, std::int64_t number,
                                      std::uint32_t& forms) {
  if (per_second == 1) return number;
  if (per_second > 1) {  // a time that is too small for the unit is in another one
    if (number < plan.oldest * per_second) return std::nullopt;
    return number / per_second;
  }
  if (number < plan.oldest * 1'000) return number;
  const bool ms = number < plan.oldest * 1'000'000, us = !ms && number < plan.oldest * 1'000'000'000;
  forms |= ms ? RowTimes::kMilliseconds : us ? RowTimes::kMicroseconds : RowTimes::kNanoseconds;
  return number / (ms ? 1'000 : us ? 1'000'000 : 1'000'000'000);
}

// The second of 2024-05-01, or of 2024-05-01T10:00:00 with a blank in place of the T and a Z behind, or not;
// none for any other text.
std::optional<std::int64_t> iso_second(std::string_view text) {
  if (text.size() == 20 && text.back() == 'Z') text.remove_suffix(1);
  if (text.size() != 10 && text.size() != 19) return std::nullopt;
  const auto number = [&](std::size_t begin, std::size_t digits) {
    int value = 0;
    for (const char c : text.substr(begin, digits)) {
      if (c < '0' || c > '9') return -1;
      value = value * 10 + (c - '0');
    }
    return value;
  };
  namespace time = std::chrono;
  const int year = number(0, 4), month = number(5, 2), day = number(8, 2);
  if (text[4] != '-' || text[7] != '-' || year < 0 || month < 0 || day < 0) return std::nullopt;
  const time::year_month_day date{time::year(year), time::month(static_cast<unsigned>(month)),
                                  time::day(static_cast<unsigned>(day))};
  if (!date.ok()) return std::nullopt;
  const std::int64_t days = time::sys_days(date).time_since_epoch().count();
  if (text.size() == 10) return days * 86'400;
  const int hour = number(11, 2), minute = number(14, 2), second = number(17, 2);
  if ((text[10] != 'T' && text[10] != ' ') || text[13] != ':' || text[16] != ':') return std::nullopt;
  if (hour < 0 || hour > 23 || minute < 0 || minute > 59 || second < 0 || second > 59) return std::nullopt;
  return days * 86'400 + hour * 3'600 + minute * 60 + second;
}

}  // namespace

bool add_row_ids(RawIds feature, std::span<const SourceColumn* const> column,
                 std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                 PackedIds& packed) {
  const bool one_each = std::ranges::all_of(column, [](const auto* block) { return block->one_each; });
  const std::size_t first = packed.ids.size(), cell = packed.splits.size();
  if (one_each && feature.kind == RawIds::Kind::kInts) {
    packed.ids.resize(first + rows.size());
    std::int64_t* const ids = packed.ids.data() + first;
    bool fine = true;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t value = block_at(column, block_of, i).ints[static_cast<std::size_t>(rows[i])];
      fine &= feature.id.takes(value);
      ids[i] = feature.id.of(value);
    }
    packed.splits.resize(cell + rows.size());
    std::iota(packed.splits.begin() + static_cast<std::ptrdiff_t>(cell), packed.splits.end(),
              static_cast<std::int64_t>(first) + 1);
    return fine;
  }
  ParsedColumn gathered = gather_column(column, block_of, rows);
  if (one_each) {
    gathered.splits.resize(rows.size() + 1);
    std::iota(gathered.splits.begin(), gathered.splits.end(), std::int64_t{0});
  }
  feature.rows = gathered.splits;
  feature.ints = gathered.ints;
  feature.floats = gathered.floats;
  feature.texts = {std::as_bytes(std::span(gathered.bytes)), gathered.inner, gathered.splits};
  return add_ids(feature, packed);
}

std::int64_t copy_row_numbers(const NumberPlan& plan, std::span<const SourceColumn* const> column,
                              std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                              std::span<float> out) {
  const std::size_t width = plan.width;
  if (out.size() != rows.size() * width)
    throw std::invalid_argument("there must be room for the numbers of each row");
  std::int64_t missing = 0;
  std::vector<float> read;  // of the texts of a row
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const SourceColumn& block = block_at(column, block_of, i);
    const auto row = static_cast<std::size_t>(rows[i]);
    const auto begin = static_cast<std::size_t>(block.splits[row]);
    auto count = static_cast<std::size_t>(block.splits[row + 1]) - begin;
    const float* floats = nullptr;
    if (block.type == ColumnType::kFloat) floats = block.floats.data() + begin;
    if (block.type == ColumnType::kBytes) {
      if (!plan.reads_texts || !read_texts(block, begin, begin + count, plan.separator, read)) return -1;
      floats = read.data();
      count = read.size();
    }
    if (count != width && count != 0) return -1;
    float* const to = out.data() + i * width;
    bool fine = true, none = count == 0;
    for (std::size_t at = 0; at < width; ++at) {
      const float number = count == 0 ? std::numeric_limits<float>::quiet_NaN()
                           : floats   ? floats[at]
                                      : static_cast<float>(block.ints[begin + at]);
      none |= std::isnan(number);
      fine &= std::isnan(number) ||
              (plan.kind == RowNumbers::kClasses ? number == 0 || number == 1 : std::isfinite(number));
      to[at] = number;
    }
    if (!fine) return -1;
    missing += none ? 1 : 0;
  }
  return missing;
}

std::optional<RowTimes> read_row_times(const TimePlan& plan, std::span<const SourceColumn* const> column,
                                       std::span<const std::int32_t> block_of,
                                       std::span<const std::int64_t> rows) {
  RowTimes found;
  found.seconds.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const SourceColumn& block = block_at(column, block_of, i);
    const auto row = static_cast<std::size_t>(rows[i]);
    const auto begin = static_cast<std::size_t>(block.splits[row]),
               end = static_cast<std::size_t>(block.splits[row + 1]);
    if (end > begin + 1 || (end > begin && block.type == ColumnType::kFloat)) return std::nullopt;
    std::optional<std::int64_t> second;
    if (end > begin && block.type == ColumnType::kInt64) {
      second = second_of(plan, plan.iso_texts ? 1 : plan.per_second, block.ints[begin], found.forms);
      if (!second) return std::nullopt;
    } else if (const std::string_view text = end > begin ? text_at(block, begin) : std::string_view();
               !text.empty()) {  // an empty one is no value
      if (is_digits(text)) {
        std::int64_t number = 0;
        if (plan.iso_texts || text.size() > 19 || !read_whole(text, number).empty()) return std::nullopt;
        second = second_of(plan, plan.per_second, number, found.forms);
      } else {
        second = iso_second(text);
        found.forms |= RowTimes::kIso;
      }
      if (!second) return std::nullopt;
    }
    if (second && (*second < 0 || *second > plan.latest)) return std::nullopt;
    if (!second && found.splits.empty()) {  // the first row without a time
      found.splits.resize(i + 1);
      std::iota(found.splits.begin(), found.splits.end(), std::int64_t{0});
    }
    if (second) found.seconds.push_back(*second);
    if (!found.splits.empty()) found.splits.push_back(static_cast<std::int64_t>(found.seconds.size()));
  }
  return found;
}

}  // namespace monolith
