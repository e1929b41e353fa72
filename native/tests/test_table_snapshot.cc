// A snapshot is the table at one moment, whatever changes afterwards.
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "table.h"
#include "table_snapshot.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;
constexpr int kDim = 3;

struct Row {
  std::int64_t time;
  std::vector<float> floats;
  bool operator==(const Row&) const = default;
};
using Content = std::map<std::int64_t, Row>;

Table make_table() {
  SegmentSpec segment;
  segment.dim = kDim;
  segment.optimizer.kind = OptimizerKind::kAdagrad;
  segment.optimizer.initial_accumulator_value = 0.1f;
  segment.initializer = {-0.05f, 0.05f};
  TableSpec spec;
  spec.segments = {segment};
  spec.expire_seconds = 1000;
  return Table(spec);
}

Ids some_ids(std::mt19937_64& random, std::size_t count, std::int64_t below) {
  Ids ids(count);
  for (auto& id : ids) id = static_cast<std::int64_t>(random() % below);
  return ids;
}

void train(Table& table, const Ids& ids, std::uint32_t time) {
  const std::vector<float> gradients(ids.size() * kDim, 0.25f);
  const float rate = 0.1f;
  table.apply_gradients(ids, gradients.data(), nullptr, {&rate, 1}, 1, {time}, true);
}

template <class Scan>
Content content(const Table& table, Scan&& scan) {
  Content found;
  for (std::uint64_t cursor = 0;;) {
    const Chunk chunk = scan(cursor);
    for (std::size_t i = 0; i < chunk.rows; ++i) {
      Row row{chunk.times[i], {}};
      row.floats.assign(chunk.values.get() + i * kDim, chunk.values.get() + (i + 1) * kDim);
      const auto state = static_cast<std::size_t>(table.state_dim());
      row.floats.insert(row.floats.end(), chunk.state.get() + i * state, chunk.state.get() + (i + 1) * state);
      CHECK(found.emplace(chunk.ids[i], row).second);
    }
    if (chunk.done) return found;
    cursor = chunk.cursor;
  }
}
Content now(const Table& table) {
  return content(table, [&](std::uint64_t cursor) { return table.scan(cursor, ~std::uint64_t{0}, 777); });
}
Content then(const Table& table, const TableSnapshot& snapshot, bool changed_only = false) {
  return content(table, [&](std::uint64_t cursor) {
    return snapshot.scan(cursor, ~std::uint64_t{0}, 777, changed_only);
  });
}

void a_snapshot_stays_as_it_was_while_rows_change_come_and_go() {
  Table table = make_table();
  std::mt19937_64 random(1);
  train(table, some_ids(random, 30'000, 40'000), 100);
  const Content before = now(table);
  TableSnapshot snapshot(table);
  CHECK_EQUAL(snapshot.rows(), before.size());
  train(table, some_ids(random, 10'000, 40'000), 200);        // rows change
  table.remove(some_ids(random, 5'000, 40'000));              // and go, and their places are taken
  train(table, some_ids(random, 200'000, 1'000'000), 5'000);  // by others; partitions split
  CHECK(then(table, snapshot) == before);
  table.evict(5'500);  // everything of the snapshot is gone now
  CHECK(then(table, snapshot) == before);
  CHECK(snapshot.captured_bytes() > 0);
  train(table, some_ids(random, 10'000, 40'000), 6'000);
  CHECK(then(table, snapshot) == before);
  snapshot.close(true);
  TableSnapshot later(table);
  CHECK(then(table, later) == now(table));
}

void a_snapshot_is_of_one_moment_while_threads_write() {
  Table table = make_table();
  std::mt19937_64 random(2);
  train(table, some_ids(random, 20'000, 30'000), 100);
  for (int round = 0; round < 5; ++round) {
    const Content before = now(table);
    TableSnapshot snapshot(table);
    std::atomic<bool> stop{false};
    std::vector<std::thread> writers;
    for (int w = 0; w < 2; ++w)
      writers.emplace_back([&, w] {
        std::mt19937_64 mine(100 * round + w);
        while (!stop) {
          train(table, some_ids(mine, 500, 60'000), 200 + round);
          table.remove(some_ids(mine, 20, 60'000));
        }
      });
    for (int again = 0; again < 3; ++again) CHECK(then(table, snapshot) == before);
    stop = true;
    for (auto& writer : writers) writer.join();
  }
}

void changes_since_the_last_snapshot_bring_a_copy_up_to_date() {
  Table table = make_table();
  table.track_changes(true);
  std::mt19937_64 random(3);
  Content copy;
  for (int round = 0; round < 30; ++round) {
    train(table, some_ids(random, 400, 5'000), 100 * round);
    table.remove(some_ids(random, 50, 5'000));
    if (round % 7 == 3) table.evict(100 * round + 200);
    if (round == 17) table.clear();
    const Content truth = now(table);
    TableSnapshot snapshot(table);
    train(table, some_ids(random, 200, 5'000), 100 * round + 50);  // of the next snapshot
    const bool saved = round % 3 != 1;                             // a failed save leaves it to the next one
    if (saved) {
      if (snapshot.cleared()) copy.clear();
      for (const std::int64_t id : snapshot.removed()) copy.erase(id);
      for (auto& [id, row] : then(table, snapshot, true)) copy[id] = row;
      CHECK(copy == truth);
    }
    snapshot.close(saved);
  }
  TableSnapshot all(table);
  CHECK(then(table, all, true).size() <= 400 + 200);  // only what changed
}

void a_second_snapshot_and_clearing_under_one_are_refused() {
  Table table = make_table();
  train(table, {1, 2, 3}, 1);
  {
    TableSnapshot snapshot(table);
    CHECK_THROWS(std::invalid_argument, "a snapshot is open already", TableSnapshot{table});
    CHECK_THROWS(std::invalid_argument, "a snapshot of this table is open", table.clear());
    CHECK_THROWS(std::invalid_argument, "does not keep track", snapshot.scan(0, ~std::uint64_t{0}, 10, true));
    snapshot.close(true);
    snapshot.close(false);
    CHECK_THROWS(std::invalid_argument, "was closed", snapshot.scan(0, ~std::uint64_t{0}, 10, false));
  }
  table.clear();
  CHECK_EQUAL(table.size(), 0u);
}

}  // namespace

int main() {
  return monolith::check::run({
      {"a snapshot stays as it was while rows change, come and go",
       a_snapshot_stays_as_it_was_while_rows_change_come_and_go},
      {"a snapshot is of one moment while threads write", a_snapshot_is_of_one_moment_while_threads_write},
      {"changes since the last snapshot bring a copy up to date",
       changes_since_the_last_snapshot_bring_a_copy_up_to_date},
      {"a second snapshot, and clearing under one, are refused",
       a_second_snapshot_and_clearing_under_one_are_refused},
  });
}
