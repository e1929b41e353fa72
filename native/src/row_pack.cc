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

// Adds whole numbers, any number of them in a row. Two passes: the sizes first, so that memory is allocated
// once.
bool add_row_ints(IdKind kind, std::span<const SourceColumn* const> column,
                  std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                  PackedIds& packed) {
  auto end = static_cast<std::int64_t>(packed.ids.size());
  std::size_t at = packed.ids.size();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t* const splits = block_at(column, block_of, i).splits.data() + rows[i];
    packed.splits.push_back(end += splits[1] - splits[0]);
  }
  packed.ids.resize(static_cast<std::size_t>(end));
  bool fine = true;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const SourceColumn& block = block_at(column, block_of, i);
    const std::int64_t* const splits = block.splits.data() + rows[i];
    for (std::int64_t from = splits[0]; from < splits[1]; ++from) {
      const std::int64_t value = block.ints[static_cast<std::size_t>(from)];
      fine &= kind.takes(value);
      packed.ids[at++] = kind.of(value);
    }
  }
  return fine;
}

// None if it is out of range, too.
std::optional<std::int64_t> in_range(const TimePlan& plan, std::optional<std::int64_t> second) {
  return second && *second >= 0 && *second <= plan.latest ? second : std::nullopt;
}

std::optional<std::int64_t> second_of_number(const TimePlan& plan, std::int64_t number,
                                             std::uint32_t& forms) {
  return in_range(plan, second_of(plan, plan.iso_texts ? 1 : plan.per_second, number, forms));
}

std::optional<std::int64_t> second_of_text(const TimePlan& plan, std::string_view text,
                                           std::uint32_t& forms) {
  if (!is_digits(text)) {
    forms |= RowTimes::kIso;
    return in_range(plan, iso_second(text));
  }
  std::int64_t number = 0;
  if (plan.iso_texts || text.size() > 19 || !read_whole(text, number).empty()) return std::nullopt;
  return in_range(plan, second_of(plan, plan.per_second, number, forms));
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
  if (feature.kind == RawIds::Kind::kInts) return add_row_ints(feature.id, column, block_of, rows, packed);
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
      second = second_of_number(plan, block.ints[begin], found.forms);
      if (!second) return std::nullopt;
    } else if (const std::string_view text = end > begin ? text_at(block, begin) : std::string_view();
               !text.empty()) {  // an empty one is no value
      second = second_of_text(plan, text, found.forms);
      if (!second) return std::nullopt;
    }
    if (!second && found.splits.empty()) {  // the first row without a time
      found.splits.resize(i + 1);
      std::iota(found.splits.begin(), found.splits.end(), std::int64_t{0});
    }
    if (second) found.seconds.push_back(*second);
    if (!found.splits.empty()) found.splits.push_back(static_cast<std::int64_t>(found.seconds.size()));
  }
  return found;
}

namespace {

// The rows of a column, one after the other.
struct RowsOfColumn {
  std::span<const SourceColumn* const> column;
  std::span<const std::int32_t> block_of;
  std::span<const std::int64_t> rows;

  // Calls `read` with the block of each row, and where its values begin and end, as long as it returns true.
  template <class Read>
  bool each(Read&& read) const {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const SourceColumn& block = block_at(column, block_of, i);
      const auto row = static_cast<std::size_t>(rows[i]);
      if (!read(i, block, static_cast<std::size_t>(block.splits[row]),
                static_cast<std::size_t>(block.splits[row + 1])))
        return false;
    }
    return true;
  }
};

// Adds a weight for each ID of the cells from `cell` on.
bool add_weights(const RowsOfColumn& from, std::optional<char> separator, const PackedIds& packed,
                 std::size_t cell, std::vector<float>& weights) {
  weights.resize(static_cast<std::size_t>(packed.splits[cell]), 1.0F);
  weights.resize(packed.ids.size(), 1.0F);
  std::vector<float> read;  // of the texts of a row
  return from.each([&](std::size_t i, const SourceColumn& block, std::size_t begin, std::size_t end) {
    const auto wanted = static_cast<std::size_t>(packed.splits[cell + i + 1] - packed.splits[cell + i]);
    float* const to = weights.data() + packed.splits[cell + i];
    if (block.type == ColumnType::kInt64) {
      if (end - begin != wanted && end != begin) return false;
      for (std::size_t at = begin; at < end; ++at) to[at - begin] = static_cast<float>(block.ints[at]);
      return true;
    }
    std::span<const float> floats;
    if (block.type == ColumnType::kFloat) {
      floats = block.floats.subspan(begin, end - begin);
    } else {
      if (!read_texts(block, begin, end, separator, read)) return false;
      floats = read;
    }
    if (floats.size() != wanted && !floats.empty()) return false;
    bool fine = true;
    for (std::size_t at = 0; at < floats.size(); ++at) {
      fine &= !std::isinf(floats[at]);
      to[at] = std::isnan(floats[at]) ? 1.0F : floats[at];
    }
    return fine;
  });
}

// Adds the seconds of the times in each row.
bool add_seconds(const RowsOfColumn& from, const TimePlan& plan, std::optional<char> separator,
                 PackedIds& packed, std::uint32_t& forms) {
  return from.each([&](std::size_t, const SourceColumn& block, std::size_t begin, std::size_t end) {
    if (block.type == ColumnType::kFloat && end > begin) return false;
    bool fine = true;
    const auto add = [&](std::optional<std::int64_t> second) {
      if (second) packed.ids.push_back(*second);
      return fine = second.has_value();
    };
    for (std::size_t at = begin; at < end && fine; ++at) {
      if (block.type == ColumnType::kInt64)
        add(second_of_number(plan, block.ints[at], forms));
      else
        each_value(text_at(block, at), separator,
                   [&](std::string_view text) { return add(second_of_text(plan, text, forms)); });
    }
    packed.splits.push_back(static_cast<std::int64_t>(packed.ids.size()));
    return fine;
  });
}

// Makes gaps of the times in the cells from `cell` on, whose IDs are in those from `of` on. A row whose event
// or whose IDs have no time has none. False if a row has other times than IDs.
bool make_gaps(const RawIds& buckets, const RowTimes& event_times, std::size_t of, std::size_t cell,
               std::size_t rows, PackedIds& packed) {
  std::int64_t begin = packed.splits[cell], to = begin;
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int64_t end = packed.splits[cell + i + 1];
    const std::int64_t items = packed.splits[of + i + 1] - packed.splits[of + i];
    const auto event = event_times.splits.empty() ? i : static_cast<std::size_t>(event_times.splits[i]);
    const bool has_event = event_times.splits.empty() || event_times.splits[i + 1] > event_times.splits[i];
    const bool counts = has_event || items == 0;
    if (counts && end > begin && end - begin != items) return false;
    for (std::int64_t at = begin; counts && at < end; ++at) {
      const std::int64_t time = packed.ids[static_cast<std::size_t>(at)];
      const std::int64_t gap = std::max<std::int64_t>(event_times.seconds[event] - time, 0);
      const auto above =
          std::ranges::upper_bound(buckets.boundaries, static_cast<double>(gap)) - buckets.boundaries.begin();
      packed.ids[static_cast<std::size_t>(to++)] = buckets.id.of(above);
    }
    begin = end;
    packed.splits[cell + i + 1] = to;
  }
  packed.ids.resize(static_cast<std::size_t>(to));
  return true;
}

// Cuts the cells from `cell` on to their first or last values.
void cut_cells(std::size_t most, bool keeps_last, std::size_t cell, PackedIds& packed) {
  std::int64_t begin = packed.splits[cell], to = begin;
  for (std::size_t i = cell + 1; i < packed.splits.size(); ++i) {
    const std::int64_t end = packed.splits[i], kept = std::min(end - begin, static_cast<std::int64_t>(most));
    const auto from = packed.ids.begin() + (keeps_last ? end - kept : begin);
    std::copy(from, from + kept, packed.ids.begin() + to);
    packed.splits[i] = to += kept;
    begin = end;
  }
  packed.ids.resize(static_cast<std::size_t>(to));
}

// How many steps the rows of a column have, those without a value included.
std::size_t count_steps(const RowsOfColumn& from, std::optional<char> separator) {
  std::size_t steps = 0;
  from.each([&](std::size_t, const SourceColumn& block, std::size_t begin, std::size_t end) {
    if (block.type != ColumnType::kBytes || !separator) {
      steps += end - begin;
      return true;
    }
    for (std::size_t at = begin; at < end; ++at) {
      const std::string_view text = text_at(block, at);
      steps += text.empty() ? 0 : 1 + static_cast<std::size_t>(std::ranges::count(text, *separator));
    }
    return true;
  });
  return steps;
}

bool add_columns(const RowFeature& feature, std::span<const std::vector<const SourceColumn*>> columns,
                 std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                 const RowTimes* event_times, WeightedIds& packed, std::vector<std::uint32_t>& forms) {
  using Kind = RowColumn::Kind;
  PackedIds& ids = packed.ids;
  const std::size_t first = ids.splits.size() - 1;
  for (std::size_t i = 0; i < feature.columns.size(); ++i) {
    const RowColumn& column = feature.columns[i];
    const RowsOfColumn from{columns[i], block_of, rows};
    const std::size_t cell = ids.splits.size() - 1;
    std::uint32_t& recognised = forms.emplace_back(0);
    if (column.kind == Kind::kWeights) {
      if (!packed.weights) packed.weights.emplace();
      if (!add_weights(from, column.ids.separator, ids, first, *packed.weights)) return false;
      continue;
    }
    if (column.kind == Kind::kIds) {
      if (!add_row_ids(column.ids, columns[i], block_of, rows, ids)) return false;
    } else if (!add_seconds(from, column.times, column.ids.separator, ids, recognised)) {
      return false;
    }
    if (column.kind == Kind::kGaps &&
        (event_times == nullptr || !make_gaps(column.ids, *event_times, first, cell, rows.size(), ids)))
      return false;
    if (!feature.steps) continue;
    if (count_steps(from, column.ids.separator) !=
        static_cast<std::size_t>(ids.splits.back() - ids.splits[cell]))
      return false;
    for (std::size_t row = 1; row <= rows.size(); ++row)
      if (ids.splits[cell + row] - ids.splits[cell] != ids.splits[first + row] - ids.splits[first])
        return false;
  }
  if (feature.most > 0) cut_cells(feature.most, feature.keeps_last, first, ids);
  return true;
}

}  // namespace

bool add_row_feature(const RowFeature& feature, std::span<const std::vector<const SourceColumn*>> columns,
                     std::span<const std::int32_t> block_of, std::span<const std::int64_t> rows,
                     const RowTimes* event_times, WeightedIds& packed, std::vector<std::uint32_t>& forms) {
  if (columns.size() != feature.columns.size())
    throw std::invalid_argument("there must be a source for each column of a feature");
  const std::size_t ids = packed.ids.ids.size(), splits = packed.ids.splits.size(), known = forms.size();
  const bool weighs = packed.weights.has_value();
  const std::size_t weights = weighs ? packed.weights->size() : 0;
  if (add_columns(feature, columns, block_of, rows, event_times, packed, forms)) return true;
  packed.ids.ids.resize(ids);
  packed.ids.splits.resize(splits);
  if (weighs)
    packed.weights->resize(weights);
  else
    packed.weights.reset();
  forms.resize(known);
  return false;
}

}  // namespace monolith
