// Histories: the last events of each user, as a stream brings them, by event time.
//
// A record sees the events of its user that came before it in the stream and are not after it in time, and
// then enters itself. An event that comes late is put at its place in time and sees only what was before it
// there, so no history holds the future. Both bounds are hard: `max` events of a user, of which the oldest
// leaves, and `max_users` users, of whom the one leaves whose last event is the oldest.
//
//     user 7    seconds  10 20 20 35        an event of second 20 sees 10 20 20, and enters after them
//               values    a  b  c  d
//
// What is kept depends on the events alone and their order, not on the batches they came in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "example_parser.h"
#include "hash.h"
#include "row_gather.h"

namespace monolith {

// Texts by number, each once, for as long as something refers to it.
class TextPool {
 public:
  TextPool() = default;
  TextPool(const TextPool&) = delete;
  TextPool& operator=(const TextPool&) = delete;
  TextPool(TextPool&&) = default;
  TextPool& operator=(TextPool&&) = default;
  ~TextPool() = default;

  std::optional<std::int64_t> find(std::string_view text) const;
  std::int64_t add(std::string_view text);  // or one more reference to it
  void drop(std::int64_t number);           // a reference
  std::string_view text(std::int64_t number) const { return texts_[static_cast<std::size_t>(number)].text; }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Text {
    std::string text;
    std::uint64_t references = 0;
  };
  std::deque<Text> texts_;  // whose texts stay where they are: the keys below are views of them
  std::vector<std::int64_t> free_;
  std::unordered_map<std::string_view, std::int64_t> numbers_;
  std::size_t bytes_ = 0;
};

// Not thread-safe.
class Histories {
 public:
  // Of a record, in `build`.
  static constexpr std::uint8_t kSees = 1;    // it has a time, and so a history
  static constexpr std::uint8_t kEnters = 2;  // later records see it

  struct Built {
    std::vector<ParsedColumn>
        columns;  // the histories: one column for each of values, all of the same splits
    std::vector<std::int64_t> entered;  // the records that entered, in order
    std::size_t left_out = 0;           // that should have, and had not exactly one value in each column
  };

  // `types` are those of the user and of each value. Throws std::invalid_argument for a limit of 0, or no
  // values.
  Histories(std::size_t max, std::size_t max_users, std::vector<ColumnType> types);
  Histories(const Histories&) = delete;
  Histories& operator=(const Histories&) = delete;
  ~Histories() = default;

  // The history of each record, in order. `columns` are the user and the values of each record; a record
  // that has not exactly one user has no history. Throws std::invalid_argument, and changes nothing, if a
  // column is of another type or size.
  Built build(std::span<const SourceColumn> columns, std::span<const std::int64_t> seconds,
              std::span<const std::uint8_t> roles);

  // What `dump` returned, or events that entered: in each row one user, the seconds of some events, and as
  // many values in each column. Throws std::invalid_argument, and changes nothing, if they are not that.
  void enter(std::span<const SourceColumn> columns);

  // All users in the order of their last events, each with its events. What enters them into histories that
  // are empty makes them equal to these, whatever comes next.
  std::vector<ParsedColumn> dump() const;

  std::size_t users() const { return slots_.size(); }
  std::size_t events() const { return events_; }
  std::size_t bytes() const;  // of memory, about

 private:
  struct User {
    std::int64_t key = 0;
    std::uint64_t turn = 0;                 // of its last event, among all that entered
    std::unique_ptr<std::int64_t[]> cells;  // NOLINT(*-avoid-c-arrays)  seconds, then each column of values
    std::uint32_t begin = 0, size = 0, capacity = 0;
  };
  // What a user had when it was put into the heap: its last event may be a later one by now.
  struct LastEvent {
    std::int64_t seconds;
    std::uint64_t turn;
    std::uint32_t slot;
    bool operator>(const LastEvent& other) const {
      return seconds != other.seconds ? seconds > other.seconds : turn > other.turn;
    }
  };
  struct Mixed {
    std::size_t operator()(std::int64_t key) const { return mix(static_cast<std::uint64_t>(key)); }
  };

  std::optional<std::int64_t> find_cell(std::size_t column, const SourceColumn& values,
                                        std::size_t place) const;
  std::int64_t add_cell(std::size_t column, const SourceColumn& values, std::size_t place);
  void drop_cell(std::size_t column, std::int64_t cell);
  std::int64_t* seconds_of(const User& user) const { return user.cells.get() + user.begin; }
  LastEvent last_of(std::uint32_t slot) const;

  void add_event(std::span<const SourceColumn> columns, std::span<const std::size_t> places,
                 std::int64_t seconds);
  User& user_of(const SourceColumn& users, std::size_t place, bool& made);
  void make_room(User& user) const;
  void drop_oldest(User& user);
  void evict();
  void append(const User& user, std::size_t events, std::span<ParsedColumn> values) const;

  const std::size_t max_, max_users_;
  const std::vector<ColumnType> types_;
  std::vector<TextPool> texts_;  // of each column
  std::vector<User> users_;      // by slot
  std::vector<std::uint32_t> free_;
  std::unordered_map<std::int64_t, std::uint32_t, Mixed> slots_;  // of users, by the cell of their key
  std::vector<LastEvent> heap_;  // the oldest first; each user once, with an event that is not after its last
  std::uint64_t turn_ = 0;
  std::size_t events_ = 0;
  std::size_t expected_ = 0;  // values of the last batch of histories
};

}  // namespace monolith
