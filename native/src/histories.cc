#include "histories.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

namespace monolith {
namespace {

std::string_view text_at(const SourceColumn& column, std::size_t place) {
  const std::int64_t begin = column.inner[place], end = column.inner[place + 1];
  return {reinterpret_cast<const char*>(column.bytes.data()) + begin, static_cast<std::size_t>(end - begin)};
}

// An empty text and NaN are no values, as features read them.
bool has_value(const SourceColumn& column, std::size_t place) {
  switch (column.type) {
    case ColumnType::kInt64:
      return true;
    case ColumnType::kFloat:
      return !std::isnan(column.floats[place]);
    default:
      return column.inner[place + 1] > column.inner[place];
  }
}

// Where the only value of a row is; nothing if it has none, or several.
std::optional<std::size_t> only_value(const SourceColumn& column, std::size_t row) {
  if (column.splits[row + 1] - column.splits[row] != 1) return std::nullopt;
  const auto place = static_cast<std::size_t>(column.splits[row]);
  return has_value(column, place) ? std::optional(place) : std::nullopt;
}

void check(bool fine, const char* why) {
  if (!fine) throw std::invalid_argument(why);
}

}  // namespace

std::optional<std::int64_t> TextPool::find(std::string_view text) const {
  const auto found = numbers_.find(text);
  return found == numbers_.end() ? std::nullopt : std::optional(found->second);
}

std::int64_t TextPool::add(std::string_view text) {
  if (const auto found = numbers_.find(text); found != numbers_.end()) {
    ++texts_[static_cast<std::size_t>(found->second)].references;
    return found->second;
  }
  if (free_.empty()) {
    free_.push_back(static_cast<std::int64_t>(texts_.size()));
    texts_.emplace_back();
  }
  const std::int64_t number = free_.back();
  free_.pop_back();
  Text& one = texts_[static_cast<std::size_t>(number)];
  one.text = text;
  one.references = 1;
  numbers_.emplace(one.text, number);
  bytes_ += text.size();
  return number;
}

void TextPool::drop(std::int64_t number) {
  Text& one = texts_[static_cast<std::size_t>(number)];
  if (--one.references > 0) return;
  numbers_.erase(one.text);
  bytes_ -= one.text.size();
  one.text = std::string();  // its memory, too
  free_.push_back(number);
}

Histories::Histories(std::size_t max, std::size_t max_users, std::vector<ColumnType> types)
    : max_(max), max_users_(max_users), types_(std::move(types)), texts_(types_.size()) {
  check(max_ > 0 && max_ < (std::size_t{1} << 31), "histories: max must be from 1 to 2^31 - 1");
  check(max_users_ > 0 && max_users_ < (std::size_t{1} << 32) - 1,
        "histories: max_users must be from 1 to 2^32 - 2");
  check(types_.size() > 1, "histories: give the type of the user and of one value at least");
}

std::optional<std::int64_t> Histories::find_cell(std::size_t column, const SourceColumn& values,
                                                 std::size_t place) const {
  switch (types_[column]) {
    case ColumnType::kInt64:
      return values.ints[place];
    case ColumnType::kFloat:
      return std::bit_cast<std::int32_t>(values.floats[place]);
    default:
      return texts_[column].find(text_at(values, place));
  }
}

std::int64_t Histories::add_cell(std::size_t column, const SourceColumn& values, std::size_t place) {
  if (types_[column] == ColumnType::kBytes) return texts_[column].add(text_at(values, place));
  return *find_cell(column, values, place);
}

void Histories::drop_cell(std::size_t column, std::int64_t cell) {
  if (types_[column] == ColumnType::kBytes) texts_[column].drop(cell);
}

Histories::LastEvent Histories::last_of(std::uint32_t slot) const {
  const User& user = users_[slot];
  return {seconds_of(user)[user.size - 1], user.turn, slot};
}

Histories::Built Histories::build(std::span<const SourceColumn> columns,
                                  std::span<const std::int64_t> seconds,
                                  std::span<const std::uint8_t> roles) {
  const std::size_t records = seconds.size();
  check(columns.size() == types_.size() && roles.size() == records,
        "histories: give a user, a second, a role and each value of every record");
  for (std::size_t i = 0; i < columns.size(); ++i)
    check(columns[i].type == types_[i] && columns[i].rows() == records,
          "histories: a column is of another type or size");
  Built built;
  for (std::size_t i = 1; i < types_.size(); ++i)
    built.columns.push_back(ParsedColumn::without_rows(types_[i]));
  std::vector<std::int64_t> splits;
  splits.reserve(records + 1);
  splits.push_back(0);
  for (ParsedColumn& column : built.columns) {
    if (column.type == ColumnType::kInt64) column.ints.reserve(expected_ + expected_ / 8);
    if (column.type == ColumnType::kFloat) column.floats.reserve(expected_ + expected_ / 8);
  }
  std::vector<std::size_t> places(columns.size());
  for (std::size_t record = 0; record < records; ++record) {
    const auto user_place = only_value(columns[0], record);
    std::size_t seen = 0;
    if (user_place && (roles[record] & kSees) != 0) {
      const auto key = find_cell(0, columns[0], *user_place);
      if (const auto found = key ? slots_.find(*key) : slots_.end(); found != slots_.end()) {
        const User& user = users_[found->second];
        const std::int64_t* const times = seconds_of(user);
        // From the end: most events come in order.
        for (seen = user.size; seen > 0 && times[seen - 1] > seconds[record];) --seen;
        append(user, seen, built.columns);
      }
    }
    splits.push_back(splits.back() + static_cast<std::int64_t>(seen));
    if ((roles[record] & kEnters) == 0) continue;
    bool whole = user_place.has_value();
    for (std::size_t i = 0; i < columns.size() && whole; ++i) {
      const auto place = only_value(columns[i], record);
      whole = place.has_value();
      places[i] = place.value_or(0);
    }
    if (!whole) {
      ++built.left_out;
      continue;
    }
    add_event(columns, places, seconds[record]);
    built.entered.push_back(static_cast<std::int64_t>(record));
  }
  expected_ = static_cast<std::size_t>(splits.back());
  for (ParsedColumn& column : built.columns) column.splits = splits;
  return built;
}

void Histories::append(const User& user, std::size_t events, std::span<ParsedColumn> values) const {
  for (std::size_t i = 1; i < types_.size(); ++i) {
    const std::int64_t* const cells = user.cells.get() + i * user.capacity + user.begin;
    ParsedColumn& out = values[i - 1];
    switch (types_[i]) {
      case ColumnType::kInt64:
        out.ints.insert(out.ints.end(), cells, cells + events);
        break;
      case ColumnType::kFloat:
        for (std::size_t j = 0; j < events; ++j)
          out.floats.push_back(std::bit_cast<float>(static_cast<std::int32_t>(cells[j])));
        break;
      default:
        for (std::size_t j = 0; j < events; ++j) {
          const std::string_view text = texts_[i].text(cells[j]);
          out.bytes.insert(out.bytes.end(), text.begin(), text.end());
          out.inner.push_back(static_cast<std::int64_t>(out.bytes.size()));
        }
    }
  }
}

void Histories::add_event(std::span<const SourceColumn> columns, std::span<const std::size_t> places,
                          std::int64_t seconds) {
  bool made = false;
  User& user = user_of(columns[0], places[0], made);
  if (user.size == max_) {
    if (seconds < seconds_of(user)[0]) return;  // the oldest of all, which would leave at once
    drop_oldest(user);
  }
  make_room(user);
  std::int64_t* const times = seconds_of(user);
  std::size_t place = user.size;
  for (; place > 0 && times[place - 1] > seconds; --place) {
  }
  for (std::size_t i = 0; i < columns.size(); ++i) {
    std::int64_t* const cells = user.cells.get() + i * user.capacity + user.begin;
    std::copy_backward(cells + place, cells + user.size, cells + user.size + 1);
    cells[place] = i == 0 ? seconds : add_cell(i, columns[i], places[i]);
  }
  if (place == user.size) user.turn = ++turn_;
  ++user.size;
  ++events_;
  if (!made) return;
  heap_.push_back(last_of(slots_.at(user.key)));
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  if (slots_.size() > max_users_) evict();
}

Histories::User& Histories::user_of(const SourceColumn& users, std::size_t place, bool& made) {
  if (const auto key = find_cell(0, users, place))
    if (const auto found = slots_.find(*key); found != slots_.end()) return users_[found->second];
  made = true;
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(users_.size()));
    users_.emplace_back();
  }
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  users_[slot].key = add_cell(0, users, place);
  slots_.emplace(users_[slot].key, slot);
  return users_[slot];
}

// Makes room for one more event. Users that have `max` events keep some free cells, so that most
// events only move the beginning: one in max / 4 moves the rest.
void Histories::make_room(User& user) const {
  if (user.begin + user.size < user.capacity) return;
  const auto most = static_cast<std::uint32_t>(max_ + max_ / 4 + 1);
  std::uint32_t capacity = user.capacity;
  if (capacity < most && user.size + 1 > capacity / 4 * 3)
    capacity = std::min(most, std::max<std::uint32_t>(4, 2 * capacity));
  std::unique_ptr<std::int64_t[]> larger;  // NOLINT(*-avoid-c-arrays)
  if (capacity != user.capacity)
    larger =
        std::make_unique_for_overwrite<std::int64_t[]>(capacity * types_.size());  // NOLINT(*-avoid-c-arrays)
  std::int64_t* const to = larger ? larger.get() : user.cells.get();
  for (std::size_t i = 0; i < types_.size() && user.size > 0; ++i)
    std::memmove(to + i * capacity, user.cells.get() + i * user.capacity + user.begin,
                 user.size * sizeof(std::int64_t));
  if (larger) user.cells = std::move(larger);
  user.begin = 0;
  user.capacity = capacity;
}

void Histories::drop_oldest(User& user) {
  for (std::size_t i = 1; i < types_.size(); ++i) drop_cell(i, user.cells[i * user.capacity + user.begin]);
  ++user.begin;
  --user.size;
  --events_;
}

// The user whose last event is the oldest leaves. An entry of the heap may be behind its user, never ahead:
// the first that is not behind is the oldest of all.
void Histories::evict() {
  while (true) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const LastEvent now = last_of(heap_.back().slot);
    if (now.turn == heap_.back().turn) break;
    heap_.back() = now;
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }
  const std::uint32_t slot = heap_.back().slot;
  heap_.pop_back();
  User& user = users_[slot];
  while (user.size > 0) drop_oldest(user);
  slots_.erase(user.key);
  drop_cell(0, user.key);
  user = User();
  free_.push_back(slot);
}

void Histories::enter(std::span<const SourceColumn> columns) {
  check(columns.size() == types_.size() + 1, "histories: give the users, the seconds and each value");
  const SourceColumn& users = columns[0];
  const SourceColumn& seconds = columns[1];
  check(seconds.type == ColumnType::kInt64, "histories: seconds are whole numbers");
  for (std::size_t i = 0; i < types_.size(); ++i) {
    const SourceColumn& one = columns[i == 0 ? 0 : i + 1];
    check(one.type == types_[i] && one.rows() == users.rows(),
          "histories: a column is of another type or size");
    check(i == 0 || std::ranges::equal(one.splits, seconds.splits),
          "histories: a user has not as many values as seconds");
    for (std::int64_t place = one.splits.front(); place < one.splits.back(); ++place)
      check(has_value(one, static_cast<std::size_t>(place)), "histories: a value is missing");
  }
  std::vector<SourceColumn> entering{users};
  entering.insert(entering.end(), columns.begin() + 2, columns.end());
  for (std::size_t row = 0; row < users.rows(); ++row)
    check(only_value(users, row).has_value() && seconds.splits[row] < seconds.splits[row + 1],
          "histories: a row is not of one user with events");
  std::vector<std::size_t> places(types_.size());
  for (std::size_t row = 0; row < users.rows(); ++row) {
    for (auto place = static_cast<std::size_t>(seconds.splits[row]);
         place < static_cast<std::size_t>(seconds.splits[row + 1]); ++place) {
      std::ranges::fill(places, place);
      places[0] = *only_value(users, row);
      add_event(entering, places, seconds.ints[place]);
    }
  }
}

std::vector<ParsedColumn> Histories::dump() const {
  std::vector<std::uint32_t> order;
  order.reserve(slots_.size());
  for (const auto& [key, slot] : slots_) order.push_back(slot);
  std::ranges::sort(order, {}, [this](std::uint32_t slot) { return users_[slot].turn; });
  std::vector<ParsedColumn> columns{ParsedColumn::without_rows(types_[0]),
                                    ParsedColumn::without_rows(ColumnType::kInt64)};
  for (std::size_t i = 1; i < types_.size(); ++i) columns.push_back(ParsedColumn::without_rows(types_[i]));
  ParsedColumn& keys = columns[0];
  ParsedColumn& seconds = columns[1];
  const std::span values = std::span(columns).subspan(2);
  for (const std::uint32_t slot : order) {
    const User& user = users_[slot];
    switch (types_[0]) {
      case ColumnType::kInt64:
        keys.ints.push_back(user.key);
        break;
      case ColumnType::kFloat:
        keys.floats.push_back(std::bit_cast<float>(static_cast<std::int32_t>(user.key)));
        break;
      default: {
        const std::string_view text = texts_[0].text(user.key);
        keys.bytes.insert(keys.bytes.end(), text.begin(), text.end());
        keys.inner.push_back(static_cast<std::int64_t>(keys.bytes.size()));
      }
    }
    keys.splits.push_back(keys.splits.back() + 1);
    seconds.ints.insert(seconds.ints.end(), seconds_of(user), seconds_of(user) + user.size);
    seconds.splits.push_back(seconds.splits.back() + user.size);
    append(user, user.size, values);
  }
  for (ParsedColumn& column : values) column.splits = seconds.splits;
  return columns;
}

std::size_t Histories::bytes() const {
  // A node of a map has about 40 bytes next to what it holds.
  std::size_t found = users_.size() * (sizeof(User) + sizeof(LastEvent) + 56);
  for (const User& user : users_) found += user.capacity * types_.size() * sizeof(std::int64_t);
  for (const TextPool& pool : texts_) found += pool.bytes();
  return found;
}

}  // namespace monolith
