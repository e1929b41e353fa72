// What only threads and sizes can show of the table; what each call does is said in tests/contracts.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "hash.h"
#include "raw_rows.h"
#include "table.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;

TableSpec spec_of(int dim, OptimizerKind kind = OptimizerKind::kSgd) {
  SegmentSpec segment;
  segment.dim = dim;
  segment.optimizer.kind = kind;
  segment.optimizer.initial_accumulator_value = 0.1f;
  segment.initializer = {-0.05f, 0.05f};
  TableSpec spec;
  spec.segments = {segment};
  spec.expire_seconds = 1000;
  return spec;
}

Ids spread_ids(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Ids ids(count);
  for (auto& id : ids) id = static_cast<std::int64_t>(random());
  return ids;
}

std::vector<float> all_rows(const Table& table) {
  std::vector<float> rows;
  for (std::uint64_t cursor = 0;;) {
    const Chunk chunk = table.scan(cursor, ~std::uint64_t{0}, 5000);
    rows.insert(rows.end(), chunk.values.get(), chunk.values.get() + chunk.rows * table.dim());
    rows.insert(rows.end(), chunk.state.get(), chunk.state.get() + chunk.rows * table.state_dim());
    if (chunk.done) return rows;
    cursor = chunk.cursor;
  }
}

void mixing_is_a_bijection() {
  for (const std::int64_t id : {std::int64_t{0}, std::int64_t{1}, std::int64_t{-1}, INT64_MIN, INT64_MAX})
    CHECK_EQUAL(unmix(mix(id)), id);
  for (const std::int64_t id : spread_ids(1000, 1)) CHECK_EQUAL(unmix(mix(id)), id);
}

void every_id_keeps_its_row_while_the_table_grows() {
  Table table(spec_of(3));
  const Ids ids = spread_ids(200'000, 2);
  std::vector<float> values(3);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    values.assign(3, static_cast<float>(i));
    table.assign({&ids[i], 1}, values.data(), {1});
  }
  CHECK_EQUAL(table.size(), ids.size());
  std::vector<float> out(3 * ids.size());
  CHECK_EQUAL(table.lookup(ids, out.data()), ids.size());
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) wrong += out[3 * i + 2] != static_cast<float>(i);
  CHECK_EQUAL(wrong, 0u);
  const TableStats stats = table.stats();
  CHECK(stats.partitions > 8);
  CHECK(stats.bytes_total >= stats.rows * table.row_bytes());
}

void the_result_does_not_depend_on_the_number_of_threads() {
  const Ids few = spread_ids(3000, 3);
  Ids ids;  // many repeats, so that order matters
  std::vector<float> gradients;
  std::mt19937 random(4);
  for (int i = 0; i < 60'000; ++i) {
    ids.push_back(i % 3 == 0 ? few[random() % few.size()] : static_cast<std::int64_t>(random()) * 7919);
    for (int j = 0; j < 4; ++j) gradients.push_back(static_cast<float>(random() % 1000) * 1e-3f);
  }
  const float rate = 0.05f;
  for (const bool dedup : {false, true}) {
    std::vector<std::vector<float>> results;
    for (const int threads : {1, 2, 5}) {
      Table table(spec_of(4, OptimizerKind::kAdagrad), nullptr, nullptr, std::make_shared<Workers>(threads));
      for (int step = 0; step < 3; ++step)
        table.apply_gradients(ids, gradients.data(), nullptr, {&rate, 1}, step, {7}, dedup);
      results.push_back(all_rows(table));
    }
    CHECK(results[0] == results[1]);
    CHECK(results[0] == results[2]);
  }
}

// Writers keep all floats of a row equal. A reader that ever sees two different ones saw half an update.
void readers_never_see_half_an_update_while_rows_come_and_go() {
  TableSpec spec = spec_of(16, OptimizerKind::kMomentum);
  spec.segments[0].initializer = {0, 0};
  spec.expire_seconds = 3;
  Table table(spec, nullptr, nullptr, std::make_shared<Workers>(2));
  const Ids ids = spread_ids(30'000, 5);
  std::atomic<bool> stop{false};
  std::atomic<std::size_t> torn{0};
  std::atomic<std::size_t> reads{0};
  std::vector<std::thread> threads;
  for (int reader = 0; reader < 2; ++reader)
    threads.emplace_back([&, reader] {
      std::vector<float> out(16 * 500);
      std::mt19937 random(reader);
      while (!stop) {
        const std::size_t from = random() % (ids.size() - 500);
        table.lookup({ids.data() + from, 500}, out.data());
        for (std::size_t i = 0; i < 500; ++i)
          for (int j = 1; j < 16; ++j) torn += out[16 * i] != out[16 * i + j];
        ++reads;
      }
    });
  threads.emplace_back([&] {  // walks, evicts, removes
    for (std::int64_t now = 0; !stop; ++now) {
      table.evict(now % 40);
      table.remove({ids.data() + now * 13 % 20'000, 50});
      const Chunk chunk = table.scan(0, ~std::uint64_t{0}, 1000);
      for (std::size_t i = 0; i < chunk.rows; ++i) torn += chunk.values[16 * i] != chunk.values[16 * i + 15];
    }
  });
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 2; ++writer)
    writers.emplace_back([&, writer] {
      std::mt19937 random(100 + writer);
      const float rate = 0.1f;
      std::vector<float> gradients(16 * 700);
      for (int round = 0; round < 150; ++round) {
        const std::size_t from = random() % (ids.size() - 700);
        for (std::size_t i = 0; i < 700; ++i)
          std::fill_n(gradients.begin() + 16 * i, 16, static_cast<float>(random() % 100));
        table.apply_gradients({ids.data() + from, 700}, gradients.data(), nullptr, {&rate, 1}, round,
                              {static_cast<std::uint32_t>(round / 5)}, round % 2 == 0);
      }
    });
  for (auto& writer : writers) writer.join();
  while (reads < 20) std::this_thread::yield();
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK_EQUAL(torn.load(), 0u);
}

void concurrent_additions_are_all_there() {
  TableSpec spec = spec_of(1);
  spec.segments[0].initializer = {0, 0};
  Table table(spec, nullptr, nullptr, std::make_shared<Workers>(2));
  const Ids ids = spread_ids(40'000, 6);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const std::vector<float> ones(ids.size(), 1.0f);
      for (int round = 0; round < 3; ++round) {
        const std::size_t half = ids.size() / 2 * ((t + round) % 2);
        table.assign_add({ids.data() + half, ids.size() / 2}, ones.data(), {1});
        table.assign_add({ids.data() + ids.size() / 2 - half, ids.size() / 2}, ones.data(), {1});
      }
    });
  for (auto& thread : threads) thread.join();
  std::vector<float> out(ids.size());
  table.lookup(ids, out.data());
  CHECK(std::all_of(out.begin(), out.end(), [](float v) { return v == 12.0f; }));
}

void asking_only_whether_ids_are_there_works_beside_a_writer() {
  Table table(spec_of(4));
  const Ids ids = spread_ids(5000, 8);
  const std::vector<float> values(4 * ids.size(), 1.0f);
  table.assign(ids, values.data(), {1});
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) table.assign(ids, values.data(), {2});
  });
  std::vector<std::uint8_t> found(ids.size());
  for (int i = 0; i < 50; ++i) {
    table.lookup_rows(ids, found.data(), nullptr, nullptr, nullptr);
    CHECK(std::all_of(found.begin(), found.end(), [](std::uint8_t there) { return there == 1; }));
  }
  stop = true;
  writer.join();
}

void clearing_under_readers_and_writers_leaves_a_table_that_works() {
  Table table(spec_of(4), nullptr, nullptr, std::make_shared<Workers>(2));
  const Ids ids = spread_ids(20'000, 7);
  const std::vector<float> values(4 * ids.size(), 1.0f);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    std::vector<float> out(4 * ids.size());
    while (!stop) table.lookup(ids, out.data());
  });
  std::thread writer([&] {
    while (!stop) table.assign(ids, values.data(), {1});
  });
  for (int i = 0; i < 10; ++i) table.clear();
  stop = true;
  reader.join();
  writer.join();
  table.assign(ids, values.data(), {1});
  CHECK_EQUAL(table.size(), ids.size());
}

void frozen_means_that_writers_wait() {
  Table table(spec_of(1));
  const std::int64_t id = 5;
  const float value = 1.0f;
  table.freeze();
  std::atomic<bool> done{false};
  std::thread writer([&] {
    table.assign({&id, 1}, &value, {1});
    done = true;
  });
  std::thread clearer([&] { table.clear(); });
  CHECK_EQUAL(table.size(), 0u);
  CHECK(!done);
  table.thaw();
  writer.join();
  clearer.join();
  table.assign({&id, 1}, &value, {1});
  CHECK_EQUAL(table.size(), 1u);
}

void a_budget_is_kept_whatever_is_thrown_at_it() {
  for (const bool expire : {false, true}) {
    TableSpec spec = spec_of(8, OptimizerKind::kAdagrad);
    spec.capacity_bytes = 3 << 20;
    spec.expire_when_full = expire;
    Table table(spec, nullptr, nullptr, std::make_shared<Workers>(2));
    std::vector<float> values(8 * 5000, 1.0f);
    std::uint64_t most = 0;
    for (int round = 0; round < 30; ++round) {
      const Ids ids = spread_ids(5000, 100 + round);
      table.assign(ids, values.data(), {static_cast<std::uint32_t>(round)});
      most = std::max(most, table.stats().bytes_total);
    }
    const TableStats stats = table.stats();
    CHECK(most <= spec.capacity_bytes + (64 << 10));  // headers of partitions are counted, not budgeted
    CHECK(stats.rows > 25'000);
    if (expire)
      CHECK(stats.evicted > 0);
    else
      CHECK_EQUAL(stats.rows + stats.refused, 150'000u);
  }
}

void raw_rows_are_read_and_changed_where_they_are() {
  RawRows raw(100, 16, std::make_shared<Workers>(2));
  const std::vector<std::uint32_t> positions{3, 99, 3};
  const std::vector<float> gradients(3 * 16, 0.25f);
  raw.update(positions, gradients.data());
  std::vector<float> out(3 * 16);
  raw.gather(positions, 16, out.data());
  CHECK_EQUAL(out[0], 0.5f);
  CHECK_EQUAL(out[16], 0.75f);
  const std::uint32_t past = 100;
  CHECK_THROWS(std::invalid_argument, "past the last row", raw.gather({&past, 1}, 16, out.data()));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"mixing is a bijection", mixing_is_a_bijection},
      {"every id keeps its row while the table grows", every_id_keeps_its_row_while_the_table_grows},
      {"the result does not depend on the number of threads",
       the_result_does_not_depend_on_the_number_of_threads},
      {"readers never see half an update while rows come and go",
       readers_never_see_half_an_update_while_rows_come_and_go},
      {"concurrent additions are all there", concurrent_additions_are_all_there},
      {"asking only whether ids are there works beside a writer",
       asking_only_whether_ids_are_there_works_beside_a_writer},
      {"clearing under readers and writers leaves a table that works",
       clearing_under_readers_and_writers_leaves_a_table_that_works},
      {"frozen means that writers wait", frozen_means_that_writers_wait},
      {"a budget is kept whatever is thrown at it", a_budget_is_kept_whatever_is_thrown_at_it},
      {"raw rows are read and changed where they are", raw_rows_are_read_and_changed_where_they_are},
  });
}
