#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "histories.h"

namespace {

using namespace monolith;
using Ints = std::vector<std::int64_t>;
using Roles = std::vector<std::uint8_t>;

constexpr std::uint8_t kBoth = Histories::kSees | Histories::kEnters;

// A column of whole numbers, one in each row; below 0 for none.
struct IntColumn {
  Ints values, splits{0};

  explicit IntColumn(const Ints& rows) {
    for (const std::int64_t row : rows) {
      if (row >= 0) values.push_back(row);
      splits.push_back(static_cast<std::int64_t>(values.size()));
    }
  }
  SourceColumn view() const {
    SourceColumn found;
    found.splits = splits;
    found.ints = values;
    settle_column(found);
    return found;
  }
};

struct TextRows {
  std::string bytes;
  Ints inner{0}, splits{0};

  explicit TextRows(const std::vector<std::string>& rows) {
    for (const std::string& row : rows) {
      bytes += row;
      inner.push_back(static_cast<std::int64_t>(bytes.size()));
      splits.push_back(splits.back() + 1);
    }
  }
  SourceColumn view() const {
    SourceColumn found;
    found.type = ColumnType::kBytes;
    found.splits = splits;
    found.inner = inner;
    found.bytes = std::as_bytes(std::span(bytes));
    settle_column(found);
    return found;
  }
};

Histories of_ints(std::size_t max, std::size_t max_users = 100) {
  return Histories(max, max_users, {ColumnType::kInt64, ColumnType::kInt64});
}

Histories::Built build(Histories& histories, const Ints& users, const Ints& items, const Ints& seconds,
                       const Roles& roles = {}) {
  const IntColumn user(users), item(items);
  return histories.build(std::vector{user.view(), item.view()}, seconds,
                         roles.empty() ? Roles(users.size(), kBoth) : roles);
}

// What a record of a user at a second sees, without entering.
Ints seen(Histories& histories, std::int64_t user, std::int64_t second) {
  return build(histories, {user}, {0}, {second}, {Histories::kSees}).columns[0].ints;
}

void a_record_sees_the_events_before_it_of_its_user() {
  Histories histories = of_ints(10);
  const auto built = build(histories, {7, 8, 7, 7}, {1, 2, 3, 4}, {10, 10, 20, 30});
  CHECK((built.columns[0].splits == Ints{0, 0, 0, 1, 3}));
  CHECK((built.columns[0].ints == Ints{1, 1, 3}));
  CHECK((built.entered == Ints{0, 1, 2, 3}) && histories.users() == 2 && histories.events() == 4);
}

void a_late_event_sees_no_future_and_enters_at_its_place() {
  Histories histories = of_ints(10);
  const auto built = build(histories, {7, 7, 7}, {1, 2, 3}, {10, 30, 20});
  CHECK((built.columns[0].splits == Ints{0, 0, 1, 2}) && (built.columns[0].ints == Ints{1, 1}));
  CHECK((seen(histories, 7, 30) == Ints{1, 3, 2}));
  CHECK((seen(histories, 7, 29) == Ints{1, 3}));
}

void events_of_one_second_keep_their_order() {
  Histories histories = of_ints(2);
  build(histories, {7, 7, 7}, {1, 2, 3}, {10, 10, 10});
  CHECK((seen(histories, 7, 10) == Ints{2, 3}));
}

void the_oldest_events_leave_for_long() {
  Histories histories = of_ints(5);
  for (std::int64_t i = 0; i < 1000; ++i) {
    build(histories, {7}, {i}, {i});
    if (i >= 4) CHECK((seen(histories, 7, i) == Ints{i - 4, i - 3, i - 2, i - 1, i}));
  }
  CHECK(histories.events() == 5);
  build(histories, {7}, {5000}, {3});  // older than all that are kept
  CHECK((seen(histories, 7, 2000) == Ints{995, 996, 997, 998, 999}));
}

void the_user_whose_last_event_is_the_oldest_leaves() {
  Histories histories = of_ints(3, 2);
  build(histories, {1, 2, 1, 3}, {11, 12, 13, 14}, {10, 20, 30, 25});
  CHECK(histories.users() == 2 && seen(histories, 2, 99).empty());
  CHECK((seen(histories, 1, 99) == Ints{11, 13}) && (seen(histories, 3, 99) == Ints{14}));
  build(histories, {4}, {15}, {5});  // itself
  CHECK(histories.users() == 2 && seen(histories, 4, 99).empty() && histories.events() == 3);
}

void a_record_without_a_user_or_a_value_enters_nothing() {
  Histories histories = of_ints(3);
  const auto built = build(histories, {-1, 7, 7}, {1, -1, 2}, {10, 10, 10});
  CHECK(built.left_out == 2 && (built.entered == Ints{2}) && built.columns[0].ints.empty());
}

void roles_say_what_sees_and_what_enters() {
  Histories histories = of_ints(3);
  const auto built = build(histories, {7, 7, 7}, {1, 2, 3}, {10, 10, 10},
                           {Histories::kEnters, Histories::kSees, Histories::kEnters});
  CHECK((built.columns[0].splits == Ints{0, 0, 1, 1}) && (built.entered == Ints{0, 2}));
}

void texts_are_kept_once_and_go_with_their_last_event() {
  Histories histories(1, 1, {ColumnType::kBytes, ColumnType::kBytes});
  const TextRows users({"ann", "bob", "bob"}), items({"x", "a longer text than fits inline", "y"});
  const auto built = histories.build(std::vector{users.view(), items.view()}, Ints{1, 2, 3}, Roles(3, kBoth));
  CHECK((built.columns[0].splits == Ints{0, 0, 0, 1}));
  CHECK(std::string(built.columns[0].bytes.begin(), built.columns[0].bytes.end()) ==
        "a longer text than fits inline");
  const auto dumped = histories.dump();
  CHECK(std::string(dumped[0].bytes.begin(), dumped[0].bytes.end()) == "bob");
  CHECK(std::string(dumped[2].bytes.begin(), dumped[2].bytes.end()) == "y");
}

void what_was_dumped_continues_alike() {
  Histories first = of_ints(3, 3);
  build(first, {1, 2, 3, 1, 2}, {1, 2, 3, 4, 5}, {10, 10, 10, 10, 9});
  const auto dumped = first.dump();
  SourceColumn columns[3];
  for (std::size_t i = 0; i < 3; ++i) {
    columns[i].splits = dumped[i].splits;
    columns[i].ints = dumped[i].ints;
    settle_column(columns[i]);
  }
  Histories second = of_ints(3, 3);
  second.enter(columns);
  CHECK(second.dump()[0].ints == dumped[0].ints && second.dump()[2].ints == dumped[2].ints);
  for (Histories* const one : {&first, &second}) build(*one, {4, 5}, {6, 7}, {10, 10});
  CHECK(first.dump()[0].ints == second.dump()[0].ints && (first.dump()[0].ints == Ints{1, 4, 5}));
}

void what_makes_no_sense_is_refused() {
  CHECK_THROWS(std::invalid_argument, "max must be from 1", of_ints(0));
  CHECK_THROWS(std::invalid_argument, "max_users must be from 1", of_ints(1, 0));
  Histories histories = of_ints(3);
  const TextRows texts({"a"});
  const IntColumn ints({1});
  CHECK_THROWS(std::invalid_argument, "another type or size",
               histories.build(std::vector{ints.view(), texts.view()}, Ints{1}, Roles{kBoth}));
  CHECK_THROWS(std::invalid_argument, "not as many values as seconds",
               histories.enter(std::vector{ints.view(), ints.view(), IntColumn({-1}).view()}));
  CHECK_THROWS(std::invalid_argument, "one user with events",
               histories.enter(std::vector{ints.view(), IntColumn({-1}).view(), IntColumn({-1}).view()}));
  CHECK(histories.events() == 0);
}

}  // namespace

int main() {
  return monolith::check::run({
      {"a record sees the events before it of its user", a_record_sees_the_events_before_it_of_its_user},
      {"a late event sees no future and enters at its place",
       a_late_event_sees_no_future_and_enters_at_its_place},
      {"events of one second keep their order", events_of_one_second_keep_their_order},
      {"the oldest events leave, for long", the_oldest_events_leave_for_long},
      {"the user whose last event is the oldest leaves", the_user_whose_last_event_is_the_oldest_leaves},
      {"a record without a user or a value enters nothing",
       a_record_without_a_user_or_a_value_enters_nothing},
      {"roles say what sees and what enters", roles_say_what_sees_and_what_enters},
      {"texts are kept once and go with their last event", texts_are_kept_once_and_go_with_their_last_event},
      {"what was dumped continues alike", what_was_dumped_continues_alike},
      {"what makes no sense is refused", what_makes_no_sense_is_refused},
  });
}
