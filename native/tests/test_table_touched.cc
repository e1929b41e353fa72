// What a table tells those who follow it; what each call touches is said in tests/contracts.
#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "digest.h"
#include "table.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;

TableSpec spec_of(int dim) {
  SegmentSpec segment;
  segment.dim = dim;
  segment.optimizer.kind = OptimizerKind::kSgd;
  segment.initializer = {0, 0};
  TableSpec spec;
  spec.segments = {segment};
  spec.expire_seconds = 10;
  return spec;
}

Ids range(std::int64_t from, std::int64_t to) {
  Ids ids(static_cast<std::size_t>(to - from));
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

Ids sorted(Ids ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

void assign(Table& table, const Ids& ids, float value, std::uint32_t time = 0) {
  const std::vector<float> values(ids.size() * table.dim(), value);
  table.assign(ids, values.data(), {time});
}

std::vector<std::uint64_t> digests(const Table& table, const Ids& buckets, std::uint64_t number = 0,
                                   std::uint64_t total = 1) {
  std::vector<std::uint64_t> sums(buckets.size());
  table.digests(buckets, number, total, sums.data());
  return sums;
}

void several_sets_hear_of_what_comes_and_goes() {
  auto first = std::make_shared<TouchedKeySet>(1000);
  auto second = std::make_shared<TouchedKeySet>(1000);
  Table table(spec_of(2), nullptr, first);
  assign(table, range(0, 10), 1);
  table.touch(second);
  assign(table, range(10, 20), 1, 30);
  table.remove(range(10, 12));
  CHECK_EQUAL(table.evict(30), 10u);
  CHECK(sorted(second->steal()) == range(0, 20));
  table.clear();
  CHECK(sorted(second->steal()) == range(12, 20));
  table.untouch(*second);
  assign(table, range(0, 3), 1);
  CHECK(second->steal().empty());
  CHECK(sorted(first->steal()) == range(0, 20));
  CHECK_EQUAL(first->lost(), 0u);
}

void clearing_more_than_a_set_holds_counts_as_lost() {
  auto set = std::make_shared<TouchedKeySet>(100);
  Table table(spec_of(2));
  assign(table, range(0, 101), 1);
  table.touch(set);
  table.clear();
  CHECK_EQUAL(set->lost(), 101u);
  CHECK(set->steal().empty());
}

void rows_pushed_out_by_a_budget_are_touched() {
  TableSpec spec = spec_of(4);
  spec.capacity_bytes = 1 << 20;
  spec.expire_when_full = true;
  auto set = std::make_shared<TouchedKeySet>(1'000'000);
  Table table(spec, nullptr, set);
  for (std::int64_t at = 0; at < 60'000; at += 1000)
    assign(table, range(at, at + 1000), 1, static_cast<std::uint32_t>(at));
  CHECK(table.stats().evicted > 0);
  set->steal();
  const std::uint64_t before = table.stats().evicted;
  assign(table, range(60'000, 61'000), 1, 60'000);
  const std::uint64_t pushed = table.stats().evicted - before;
  const Ids touched = sorted(set->steal());
  std::vector<std::uint8_t> found(touched.size());
  table.lookup_rows(touched, found.data(), nullptr, nullptr, nullptr);
  const auto gone = static_cast<std::uint64_t>(std::count(found.begin(), found.end(), 0));
  CHECK(pushed > 0);
  CHECK(gone >= pushed);
  CHECK(touched.size() >= 1000);
}

// A set that is stolen from while others write hears of every change after it was made: whoever looks a
// stolen id up finds it as it is, or hears of it again.
void what_was_stolen_is_found_as_it_is() {
  TableSpec spec = spec_of(2);
  auto set = std::make_shared<TouchedKeySet>(1'000'000);
  Table table(spec, nullptr, set, std::make_shared<Workers>(2));
  std::atomic<bool> done{false};
  std::map<std::int64_t, float> followed;
  std::thread writer([&] {
    std::mt19937 random(5);
    for (int i = 0; i < 400; ++i) {
      const auto from = static_cast<std::int64_t>(random() % 5000);
      if (i % 3 == 2)
        table.remove(range(from, from + 200));
      else
        assign(table, range(from, from + 200), static_cast<float>(i));
    }
    done = true;
  });
  const auto follow = [&] {
    const Ids ids = set->steal();
    std::vector<std::uint8_t> found(ids.size());
    std::vector<float> values(2 * ids.size());
    table.lookup_rows(ids, found.data(), nullptr, values.data(), nullptr);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (found[i])
        followed[ids[i]] = values[2 * i];
      else
        followed.erase(ids[i]);
    }
  };
  while (!done) follow();
  writer.join();
  follow();
  CHECK_EQUAL(followed.size(), table.size());
  std::size_t wrong = 0;
  for (const auto& [id, value] : followed) {
    float row[2];
    table.lookup({&id, 1}, row);
    wrong += row[0] != value;
  }
  CHECK_EQUAL(wrong, 0u);
}

void digests_are_those_of_the_rows() {
  Table table(spec_of(3));
  std::mt19937_64 random(7);
  Ids ids(50'000);
  for (auto& id : ids) id = static_cast<std::int64_t>(random());
  std::vector<float> values(3 * ids.size());
  for (auto& value : values) value = static_cast<float>(random() % 1000) * 1e-3f;
  table.assign(ids, values.data(), {0});
  std::vector<std::uint64_t> expected(4096), odd(4096);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint64_t digest = row_digest(ids[i], {values.data() + 3 * i, 3});
    expected[bucket_of(mix(ids[i]))] += digest;
    if (static_cast<std::uint64_t>(ids[i]) % 3 == 1) odd[bucket_of(mix(ids[i]))] += digest;
  }
  const Ids all = range(0, 4096);
  CHECK(digests(table, all) == expected);
  CHECK(digests(table, all, 1, 3) == odd);
  const Ids some{0, 1, 7, 4095};
  CHECK(digests(table, some) ==
        (std::vector<std::uint64_t>{expected[0], expected[1], expected[7], expected[4095]}));
  table.assign_add({&ids[5], 1}, values.data(), {0});
  expected[bucket_of(mix(ids[5]))] = digests(table, {static_cast<std::int64_t>(bucket_of(mix(ids[5])))})[0];
  CHECK(digests(table, all) == expected);
  table.clear();
  CHECK(digests(table, all) == std::vector<std::uint64_t>(4096));
  CHECK_THROWS(std::invalid_argument, "ascending", digests(table, {3, 3}));
  CHECK_THROWS(std::invalid_argument, "ascending", digests(table, {4096}));
  CHECK_THROWS(std::invalid_argument, "share", digests(table, {1}, 2, 2));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"several sets hear of what comes and goes", several_sets_hear_of_what_comes_and_goes},
      {"clearing more than a set holds counts as lost", clearing_more_than_a_set_holds_counts_as_lost},
      {"rows pushed out by a budget are touched", rows_pushed_out_by_a_budget_are_touched},
      {"what was stolen is found as it is", what_was_stolen_is_found_as_it_is},
      {"digests are those of the rows", digests_are_those_of_the_rows},
  });
}
