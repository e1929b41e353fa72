#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "hash.h"
#include "table_group.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;
using Times = std::vector<std::uint32_t>;

std::shared_ptr<Table> table(int dim, bool serving = false, bool delay_compensated = false) {
  TableSpec spec;
  spec.segments = {{dim, {}, {}, {}}};
  spec.segments[0].optimizer.delay_compensated = delay_compensated;
  spec.segments[0].optimizer.lambda = 1;
  spec.serving = serving;
  return std::make_shared<Table>(spec);
}

Floats read(const Table& table, const Ids& ids) {
  Floats values(ids.size() * table.dim());
  table.lookup(ids, values.data());
  return values;
}

void offsets_follow_shards_then_tables() {
  const FusedOffsets at = fused_offsets(Ids{1, 2}, Ids{1, 0, 2, 3}, 2, 6);
  CHECK(at.ids == (Ids{0, 1, 1, 3, 6}));
  CHECK(at.floats == (Ids{0, 1, 1, 3, 9}));
  CHECK(at.recv_splits == (Ids{1, 8}));
}

void sizes_that_do_not_fit_are_refused() {
  const Ids dims{1, 2};
  const std::int64_t huge = INT64_MAX;
  CHECK_THROWS(std::invalid_argument, "num_shards", fused_offsets(dims, Ids{}, 0, 0));
  CHECK_THROWS(std::invalid_argument, "expected 4, got 3", fused_offsets(dims, Ids{1, 1, 1}, 2, 3));
  CHECK_THROWS(std::invalid_argument, "expected 2, got 4", fused_offsets(dims, Ids{1, 1, 1, 1}, 1, 4));
  CHECK_THROWS(std::invalid_argument, "got -1", fused_offsets(dims, Ids{-1, 2}, 1, 1));
  CHECK_THROWS(std::invalid_argument, "more than the 3 ids", fused_offsets(dims, Ids{huge, huge}, 1, 3));
  CHECK_THROWS(std::invalid_argument, "expected 3, got 2", fused_offsets(dims, Ids{1, 1}, 1, 3));
  CHECK_THROWS(std::invalid_argument, "dims", fused_offsets(Ids{0}, Ids{1}, 1, 1));
  CHECK_THROWS(std::invalid_argument, "more floats", fused_offsets(Ids{huge}, Ids{2}, 1, 2));
}

void a_group_needs_tables() {
  CHECK_THROWS(std::invalid_argument, "tables", TableGroup({nullptr}));
}

void lookups_read_each_piece_from_its_table() {
  const auto a = table(1), b = table(2);
  a->assign(Ids{1}, Floats{5}.data(), {});
  b->assign(Ids{1, 2}, Floats{6, 7, 8, 9}.data(), {});
  const TableGroup group({a, b});
  const Ids ids{1, 2, 1, 9, 2}, sizes{1, 1, 2, 1};
  Floats out(7, -1);
  group.lookup(ids, sizes, 2, out);
  CHECK(out == (Floats{5, 8, 9, 5, 0, 8, 9}));
  CHECK_THROWS(std::invalid_argument, "expected 7, got 6",
               group.lookup(ids, sizes, 2, std::span(out).first(6)));
}

void a_table_sees_its_ids_of_all_shards_in_order() {
  for (const bool dedup : {false, true}) {
    const auto a = table(1), b = table(2);
    // a: ids 1, 3 from shard 0 and 1 from shard 1; b: id 1 from shard 1.
    const Floats values{1, 2, 4, 8, 16};
    const Times times{30, 10, 20, 5};
    TableGroup({a, b}).apply_gradients(Ids{1, 3, 1, 1}, Ids{2, 0, 1, 1}, 2,
                                       {values, {}, Floats{1, 0.5}, 0, times, dedup});
    CHECK(read(*a, Ids{1, 3}) == (Floats{-5, -2}));
    CHECK(read(*b, Ids{1}) == (Floats{-4, -8}));
    std::int64_t when = 0;
    a->lookup_rows(Ids{1}, nullptr, &when, nullptr, nullptr);
    CHECK_EQUAL(when, 30);  // the newest of equal ids, in whichever order they come
  }
}

void latest_values_are_gathered_like_gradients() {
  const auto a = table(1), b = table(1, false, true), idle = table(2, false, true);
  b->assign(Ids{1, 2}, Floats{10, 20}.data(), {});
  const Floats values{1, 1, 1, 2}, latest{0, 7, 0, 15}, rates{1, 1, 1};
  TableGroup({a, b, idle})
      .apply_gradients(Ids{1, 1, 1, 2}, Ids{1, 1, 0, 1, 1, 0}, 2,
                       {values, latest, rates, 0, Times{0}, false});
  CHECK(read(*a, Ids{1}) == (Floats{-2}));
  CHECK(read(*b, Ids{1, 2}) == (Floats{10 - (1 + 1 * 3), 20 - (2 + 4 * 5)}));
}

void gradients_that_do_not_fit_touch_nothing() {
  const auto a = table(1), b = table(2);
  const TableGroup group({a, b});
  const Ids ids{1, 1}, sizes{1, 1};
  const Floats values{1, 1, 1}, rates{1, 1}, one{1};
  const Times now{7}, many{1, 2, 3};
  using Error = std::invalid_argument;
  CHECK_THROWS(Error, "expected 3, got 1",
               group.apply_gradients(ids, sizes, 1, {one, {}, rates, 0, now, false}));
  CHECK_THROWS(Error, "latest", group.apply_gradients(ids, sizes, 1, {values, one, rates, 0, now, false}));
  CHECK_THROWS(Error, "expected 2, got 1",
               group.apply_gradients(ids, sizes, 1, {values, {}, one, 0, now, false}));
  CHECK_THROWS(Error, "event times",
               group.apply_gradients(ids, sizes, 1, {values, {}, rates, 0, many, false}));
  CHECK_THROWS(
      Error, "serving",
      TableGroup({a, table(2, true)}).apply_gradients(ids, sizes, 1, {values, {}, rates, 0, now, false}));
  CHECK_THROWS(Error, "latest",
               TableGroup({a, table(2, false, true)})
                   .apply_gradients(ids, sizes, 1, {values, {}, rates, 0, now, false}));
  CHECK_EQUAL(a->size() + b->size(), 0u);
}

// Rows of a batch leave their tables whole, each once; ids without a row and other rows stay as they are.
void found_rows_are_taken_out() {
  TableSpec spec;
  spec.segments = {{2, {}, {}, {}}};
  spec.segments[0].optimizer.kind = OptimizerKind::kAdagrad;
  const auto a = table(1), b = std::make_shared<Table>(spec), idle = table(3);
  a->assign(Ids{1, 2, 3}, Floats{10, 20, 30}.data(), {.all = 5});
  const Times times{7, 8};
  b->restore(Ids{1, 4}, times.data(), Floats{1, 2, 3, 4}.data(), Floats{5, 6, 7, 8}.data(), nullptr);
  const auto workers = std::make_shared<Workers>(2);
  const TableGroup group({a, b, idle}, workers);
  const FoundRows found = group.find(Ids{3, 9, 3, 1, 4, 4, 5}, Ids{4, 3, 0});
  CHECK(found.ids == (std::vector<Ids>{{3, 1}, {4}, {}}));
  CHECK(found.distinct == (Ids{3, 2, 0}));
  CHECK(found.sightings == (Ids{3, 2, 0}));
  CHECK_EQUAL(a->size() + b->size(), 5u);  // finding changes nothing
  Ids ids(3), when(3);
  Floats values(4), state(2);
  CHECK_THROWS(std::invalid_argument, "expected 4, got 3",
               group.take(found, {ids, when, std::span(values).first(3), state}));
  group.take(found, {ids, when, values, state});
  CHECK(ids == (Ids{3, 1, 4}));
  CHECK(when == (Ids{5, 5, 8}));
  CHECK(values == (Floats{30, 10, 3, 4}));
  CHECK(state == (Floats{7, 8}));
  CHECK(read(*a, Ids{1, 2, 3}) == (Floats{0, 20, 0}));
  CHECK_EQUAL(b->size(), 1u);
  CHECK_THROWS(std::invalid_argument, "as many tables",
               TableGroup({a}).take(found, {ids, when, values, state}));
}

// Of rows on the way back, some positions have none.
void rows_are_put_where_they_were_taken_from() {
  const auto a = table(1), b = table(2);
  const TableGroup group({a, b, table(3)}, std::make_shared<Workers>(2));
  const Ids hashes{static_cast<std::int64_t>(mix(7)), static_cast<std::int64_t>(mix(-8)), 99};
  const Ids times{5, 6, 0};
  const std::vector<std::uint8_t> there{1, 1, 0}, all{1, 1};
  const Floats values{10, 20, 99}, wide{1, 2, 3, 4};
  const std::span<const std::int64_t> two = std::span(hashes).first(2), when = std::span(times).first(2);
  const std::vector<IncomingRows> rows{{hashes, times, there, values, {}}, {two, when, all, wide, {}}, {}};
  CHECK(group.put(rows) == (std::vector<std::size_t>{2, 2, 0}));
  CHECK(read(*a, Ids{7, -8, 3}) == (Floats{10, 20, 0}));
  CHECK(read(*b, Ids{7, -8}) == wide);
  CHECK_EQUAL(a->size(), 2u);
  CHECK_EQUAL(a->max_event_time(), 6);
  CHECK_THROWS(std::invalid_argument, "by table", TableGroup({a}).put(rows));
  const std::vector<IncomingRows> short_of_values{{hashes, times, there, wide, {}}, {}, {}};
  CHECK_THROWS(std::invalid_argument, "values of all rows", group.put(short_of_values));
}

// More rows than a window, of several partitions; an id without a row, and one that came twice.
void many_rows_are_taken_at_once() {
  const auto a = table(1);
  Ids ids;
  Floats values;
  for (int i = 0; i < 40000; ++i) {
    ids.push_back(i);
    values.push_back(static_cast<float>(i));
  }
  a->assign(ids, values.data(), {3});
  Ids taken;
  for (int i = 39999; i >= 0; i -= 3) taken.push_back(i);
  taken.push_back(-5);
  taken.push_back(39999);
  Ids times(taken.size(), -1);
  Floats out(taken.size(), -1), none(1);
  a->take(taken, times.data(), out.data(), none.data());
  for (std::size_t i = 0; i + 2 < taken.size(); ++i) {
    CHECK_EQUAL(out[i], static_cast<float>(taken[i]));
    CHECK_EQUAL(times[i], 3);
  }
  CHECK_EQUAL(out[taken.size() - 2], 0.0f);
  CHECK_EQUAL(a->size(), ids.size() - (taken.size() - 2));
  CHECK_EQUAL(a->stats().removed, taken.size() - 2);
  const Floats left = read(*a, ids);
  for (int i = 0; i < 40000; ++i) CHECK_EQUAL(left[i], i % 3 == 0 ? 0.0f : static_cast<float>(i));
}

void an_empty_call_is_a_call() {
  TableGroup({}).apply_gradients({}, {}, 3, {{}, {}, {}, 0, {}, false});
  TableGroup({table(1)}).lookup({}, Ids{0, 0}, 2, {});
  TableGroup({table(1)}).apply_gradients({}, Ids{0}, 1, {{}, {}, Floats{1}, 0, Times{3}, true});
}

// Callers that share a group and its workers, each with tables of many ids.
void workers_share_tables_among_callers() {
  const auto workers = std::make_shared<Workers>(3);
  std::vector<std::shared_ptr<Table>> tables;
  for (int t = 0; t < 5; ++t) tables.push_back(table(2));
  const TableGroup group(tables, workers);
  Ids ids, sizes(5, 200);
  for (int t = 0; t < 5; ++t)
    for (int i = 0; i < 200; ++i) ids.push_back(i);
  const Floats gradients(ids.size() * 2, 1), rates(5, 1);
  const Times times{1}, counts(ids.size(), 3);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      group.apply_gradients(ids, sizes, 1, {gradients, {}, rates, 0, times, false, counts});
      Floats out(ids.size() * 2);
      group.lookup(ids, sizes, 1, out);
    });
  for (auto& caller : callers) caller.join();
  Floats out(ids.size() * 2);
  group.lookup(ids, sizes, 1, out);
  CHECK(out == Floats(ids.size() * 2, -4));
  const Times few{1, 2};
  const TableGroup::Gradients wrong{gradients, {}, rates, 0, times, false, few};
  CHECK_THROWS(std::invalid_argument, "counts", group.apply_gradients(ids, sizes, 1, wrong));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"offsets follow shards then tables", offsets_follow_shards_then_tables},
      {"sizes that do not fit are refused", sizes_that_do_not_fit_are_refused},
      {"a group needs tables", a_group_needs_tables},
      {"lookups read each piece from its table", lookups_read_each_piece_from_its_table},
      {"a table sees its ids of all shards in order", a_table_sees_its_ids_of_all_shards_in_order},
      {"latest values are gathered like gradients", latest_values_are_gathered_like_gradients},
      {"gradients that do not fit touch nothing", gradients_that_do_not_fit_touch_nothing},
      {"found rows are taken out", found_rows_are_taken_out},
      {"rows are put where they were taken from", rows_are_put_where_they_were_taken_from},
      {"many rows are taken at once", many_rows_are_taken_at_once},
      {"an empty call is a call", an_empty_call_is_a_call},
      {"workers share tables among callers", workers_share_tables_among_callers},
  });
}
