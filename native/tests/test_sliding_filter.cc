#include <chrono>
#include <cmath>
#include <fstream>
#include <random>
#include <thread>
#include <unordered_set>
#include <vector>

#include "check.h"
#include "probabilistic_filter.h"
#include "sliding_filter.h"

namespace {

using namespace monolith;
using Counts = std::vector<std::uint32_t>;
using Mask = std::vector<std::uint8_t>;

std::vector<std::int64_t> random_ids(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> ids(n);
  for (auto& id : ids) id = static_cast<std::int64_t>(random());
  return ids;
}

template <class Filter>
Mask refused(Filter& filter, const std::vector<std::int64_t>& ids, const Counts& counts = {}) {
  Mask mask(ids.size());
  filter.refuse(ids, counts, mask);
  return mask;
}

void counts_saturate_at_15() {
  SlidingFilter filter(100, 10, SlotThresholds());
  Counts before;
  for (int i = 0; i < 17; ++i) before.push_back(filter.add(1, 1));
  CHECK(before == Counts({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 15}));
}

void one_element_is_one_element_however_often_seen() {
  SlidingFilter filter(1'000'000, 10, SlotThresholds());
  const auto id = static_cast<std::int64_t>(10000002961562801052u);
  CHECK_EQUAL(filter.add(id, 1), 0u);
  CHECK_EQUAL(filter.add(id, 20), 1u);
  CHECK_EQUAL(filter.add(id, 1), 15u);
  CHECK_EQUAL(filter.get(id), 15u);
  CHECK_EQUAL(filter.size(), 1u);
}

void no_sighting_leaves_no_trace() {
  SlidingFilter filter(300, 7, SlotThresholds(1));
  CHECK_EQUAL(filter.add(9, 0), 0u);
  CHECK_EQUAL(filter.get(9), 0u);
  CHECK_EQUAL(filter.size(), 0u);
}

void a_threshold_of_zero_records_nothing() {
  SlidingFilter filter(1'000'000, 10, SlotThresholds());
  const std::int64_t asked[] = {0, 2, 4, 6, 8}, unasked[] = {0, 1, 2, 3, 4};
  for (int i = 0; i < 5; ++i) {
    CHECK(!filter.should_be_filtered(unasked[i], 1, 0));
    CHECK(filter.should_be_filtered(asked[i], 1, 1));
  }
  CHECK_EQUAL(filter.size(), 5u);
}

void the_first_threshold_sightings_are_refused_the_next_admits() {
  SlidingFilter filter(1000, 7, SlotThresholds());
  for (int i = 0; i < 17; ++i) CHECK_EQUAL(filter.should_be_filtered(7, 1, 15), i < 15);
}

void gradient_interception_counts_ids_in_order() {
  SlidingFilter filter(100, 7, SlotThresholds(3));
  const std::vector<std::int64_t> ids{1, 3 << 17, 1};
  CHECK(refused(filter, ids) == Mask({1, 1, 1}));
  CHECK(refused(filter, ids) == Mask({1, 1, 0}));
  CHECK(refused(filter, ids) == Mask({0, 1, 0}));
  CHECK(refused(filter, ids) == Mask({0, 0, 0}));

  SlidingFilter narrow(300, 100, SlotThresholds(2));
  const std::vector<std::int64_t> others{1, 1 << 17, 1 << 18, 1};
  CHECK(refused(narrow, others) == Mask({1, 1, 1, 1}));
  CHECK(refused(narrow, others) == Mask({0, 1, 1, 0}));
  CHECK(refused(narrow, others) == Mask({0, 0, 0, 0}));
}

void a_batch_answers_as_single_calls_do() {
  SlidingFilter single(20'000, 7, SlotThresholds(4)), batched(20'000, 7, SlotThresholds(4));
  std::mt19937_64 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::int64_t> ids(1000);
    Counts counts(1000);
    Mask expected(1000);
    for (int i = 0; i < 1000; ++i) {
      ids[i] = static_cast<std::int64_t>(random() % 40'000 << 20);
      counts[i] = static_cast<std::uint32_t>(random() % 3);
      expected[i] = single.refuses(ids[i], counts[i]);
    }
    CHECK(refused(batched, ids, counts) == expected);
  }
  CHECK(single.meta().head_increment > 2);
  CHECK_EQUAL(single.size(), batched.size());
  CHECK_THROWS(std::invalid_argument, "one length", refused(batched, {1, 2}, {1}));
}

void thresholds_go_by_slot() {
  SlidingFilter filter(1000, 7, SlotThresholds(0, {{5, 1}, {6, 15}}));
  const std::int64_t five = std::int64_t{5} << 48, six = std::int64_t{6} << 48, seven = std::int64_t{7} << 48;
  CHECK(filter.refuses(five, 1) && !filter.refuses(five, 1));
  CHECK(filter.refuses(six, 14) && filter.refuses(six, 1) && !filter.refuses(six, 1));
  CHECK(!filter.refuses(seven, 1));
  CHECK_EQUAL(filter.get(seven), 0u);
  CHECK(filter.refuses(five | std::int64_t{1} << 63, 1));  // the sign is no part of the slot
}

void thresholds_it_cannot_count_to_are_rejected() {
  CHECK_THROWS(std::invalid_argument, "threshold 16: the sliding filter counts to 15",
               SlidingFilter(1000, 7, SlotThresholds(16)));
  CHECK_THROWS(std::invalid_argument, "threshold 99", SlidingFilter(1000, 7, SlotThresholds(1, {{3, 99}})));
  CHECK_THROWS(std::invalid_argument, "slots end at 32767", SlotThresholds(1, {{32768, 1}}));
  SlidingFilter filter(1000, 7, SlotThresholds(15));
  CHECK_THROWS(std::invalid_argument, "threshold 16", filter.should_be_filtered(1, 1, 16));
}

void small_filters_are_made_large_enough_and_say_so() {
  SlidingFilter filter(1, 2, SlotThresholds(1));
  CHECK_EQUAL(filter.splits(), 5u);
  CHECK_EQUAL(filter.meta().split_num, 5u);
  CHECK_EQUAL(filter.meta().max_forward_step, 2u);
  CHECK_EQUAL(filter.meta().max_backward_step, 3u);
  CHECK_EQUAL(filter.meta().max_step, 16u);
  CHECK_EQUAL(filter.split_meta(4).total_size, 90u);  // 300 / 4 * 1.2
  CHECK_EQUAL(filter.split_meta(4).fill_rate, 1.2);
  CHECK_EQUAL(filter.cells_per_split(), 90u + 64u);
  CHECK_THROWS(std::invalid_argument, "no split 5", filter.split_meta(5));
}

void the_head_moves_on_when_full_and_old_counts_fade() {
  SlidingFilter filter(600, 7, SlotThresholds());  // splits of 100
  filter.add(-5, 3);
  std::int64_t next = 1'000'000;
  const auto fill_one_split = [&] {
    const auto before = filter.meta().head_increment;
    while (filter.meta().head_increment == before) filter.add(next += 7919 << 17, 1);
  };
  fill_one_split();
  CHECK_EQUAL(filter.meta().head, 1u);
  CHECK_EQUAL(filter.split_meta(0).num_elements, 99u);
  CHECK_EQUAL(filter.get(-5), 3u);
  CHECK_EQUAL(filter.add(-5, 1), 3u);  // now in split 1, with its count
  CHECK_EQUAL(filter.get(-5), 4u);
  for (int i = 0; i < 5; ++i) fill_one_split();
  CHECK_EQUAL(filter.meta().head, 6u);
  CHECK_EQUAL(filter.split_meta(0).num_elements, 0u);  // wiped: it is next
  CHECK_EQUAL(filter.get(-5), 4u);
  fill_one_split();
  CHECK_EQUAL(filter.meta().head, 0u);
  CHECK_EQUAL(filter.meta().head_increment, 7u);
  CHECK_EQUAL(filter.get(-5), 0u);  // split 1 was wiped
}

// The share of keys, each seen once, that were taken for known when first seen (`taken`) or read a wrong
// count in the end (`wrong`).
struct Errors {
  double taken = 0, wrong = 0;
};

template <class Filter>
Errors errors(Filter& filter, std::size_t n) {
  const auto ids = random_ids(n, 17);
  std::size_t taken = 0, wrong = 0;
  for (const auto id : ids) taken += filter.add(id, 1) != 0;
  for (const auto id : ids) wrong += filter.get(id) != 1;
  std::cout << "  " << 100.0 * taken / n << "% taken for known, " << 100.0 * wrong / n << "% wrong counts, "
            << filter.failures() << " failures\n";
  return {static_cast<double>(taken) / n, static_cast<double>(wrong) / n};
}

void a_million_keys_are_counted_as_accurately_as_promised() {
  constexpr std::size_t n = 1'000'000;
  SlidingFilter ample(n, 10, SlotThresholds());
  const Errors few = errors(ample, n);
  CHECK(few.taken < 0.009 && few.wrong > 0.006 && few.wrong < 0.012);  // about 0.9%
  CHECK(ample.failures() < n / 10'000);
  SlidingFilter half(n / 2, 10, SlotThresholds());
  const double forgotten = errors(half, n).wrong;
  CHECK(forgotten > 0.45 && forgotten < 0.55);
  HashFilter plain(n, 2);
  const double collided = errors(plain, n).wrong;
  CHECK(collided > 0.0001 && collided < 0.0004);  // about 0.024%
  CHECK_EQUAL(plain.failures(), 0u);
}

void copy(const SlidingFilter& from, SlidingFilter& to) {
  to.restore(from.meta());
  for (std::size_t split = 0; split < from.splits(); ++split) {
    to.restore_split(split, from.split_meta(split));
    std::vector<SlidingFilter::Cell> cells(1000);
    for (std::size_t offset = 0; offset < from.cells_per_split(); offset += cells.size()) {
      cells.resize(std::min<std::size_t>(1000, from.cells_per_split() - offset));
      from.read_cells(split, offset, cells);
      to.write_cells(split, offset, cells);
    }
  }
}

void a_restored_filter_goes_on_where_the_saved_one_was() {
  SlidingFilter saved(20'000, 7, SlotThresholds(2)), restored(20'000, 7, SlotThresholds(2));
  for (const auto id : random_ids(17'000, 1)) saved.add(id, 1);
  for (const auto id : random_ids(30'000, 2)) restored.add(id, 3);  // to be forgotten
  copy(saved, restored);
  CHECK_EQUAL(restored.size(), saved.size());
  CHECK_EQUAL(restored.failures(), saved.failures());
  for (std::size_t split = 0; split < 7; ++split)
    CHECK_EQUAL(restored.split_meta(split).num_elements, saved.split_meta(split).num_elements);
  for (const auto id : random_ids(17'000, 1)) CHECK_EQUAL(restored.get(id), saved.get(id));
  for (const auto id : random_ids(25'000, 1)) CHECK_EQUAL(restored.refuses(id, 1), saved.refuses(id, 1));
  CHECK_EQUAL(restored.meta().head, saved.meta().head);
}

void what_does_not_fit_is_not_restored() {
  SlidingFilter filter(20'000, 7, SlotThresholds(2));
  filter.add(1, 1);
  CHECK_THROWS(std::invalid_argument, "saved with split_num 10, this one has 7",
               filter.restore(SlidingFilter(20'000, 10, SlotThresholds(2)).meta()));
  auto meta = filter.meta();
  meta.max_step = 64;
  CHECK_THROWS(std::invalid_argument, "saved with max_step 64, this one has 16", filter.restore(meta));
  meta = filter.meta();
  meta.head = 7;
  CHECK_THROWS(std::invalid_argument, "head is split 7 of 7", filter.restore(meta));
  CHECK_THROWS(std::invalid_argument, "total_size",
               filter.restore_split(0, SlidingFilter(40'000, 7, SlotThresholds(2)).split_meta(0)));
  std::vector<SlidingFilter::Cell> cells(filter.cells_per_split());
  CHECK_THROWS(std::invalid_argument, "cells 1 to", filter.write_cells(0, 1, cells));
  CHECK_EQUAL(filter.get(1), 1u);
}

void threads_lose_no_sighting() {
  constexpr int kThreads = 4;
  constexpr std::size_t n = 20'000;
  SlidingFilter filter(200'000, 7, SlotThresholds(1));
  const auto ids = random_ids(n, 9);
  std::vector<std::thread> threads;
  std::atomic<std::size_t> admitted{0};
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::size_t mine = 0;
      std::mt19937_64 random(t);
      auto order = ids;
      std::shuffle(order.begin(), order.end(), random);
      for (const auto id : order) mine += !filter.refuses(id, 1);
      admitted += mine;
    });
  for (auto& thread : threads) thread.join();
  std::size_t low = 0;
  for (const auto id : ids) low += filter.get(id) < kThreads;
  CHECK_EQUAL(low, 0u);
  // Each id is refused once and then admitted, but for the few that share a cell.
  CHECK(admitted >= n * (kThreads - 1) && admitted < n * (kThreads - 1) * 1.01);
}

void threads_move_the_head_while_others_save() {
  SlidingFilter filter(3'000, 7, SlotThresholds(3));
  std::vector<std::thread> threads;
  std::atomic<bool> done{false};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const auto ids = random_ids(10'000, t);
      Mask mask(ids.size());
      filter.refuse(ids, {}, mask);
    });
  std::thread saver([&] {
    while (!done) {
      SlidingFilter other(3'000, 7, SlotThresholds(3));
      copy(filter, other);
      other.size();
    }
  });
  for (auto& thread : threads) thread.join();
  done = true;
  saver.join();
  // 500 to a split: 40,000 new ids fill it about 80 times; a share overflows into the next split first.
  const auto moves = filter.meta().head_increment;
  CHECK(moves >= 70 && moves <= 82);
}

void an_unused_filter_takes_no_memory() {
  const auto resident = [] {
    std::size_t total = 0, pages = 0;
    std::ifstream("/proc/self/statm") >> total >> pages;
    return pages * 4096;
  };
  const auto before = resident();
  SlidingFilter filter(SlidingFilter::kDefaultCapacity, SlidingFilter::kDefaultSplits, SlotThresholds(3));
  for (int i = 0; i < 5; ++i) filter.add(i, 1);
  CHECK(resident() < before + (64u << 20));
}

void chance_admits_at_the_promised_rate() {
  const double unequal[] = {1 / 7., 2 / 7., 3 / 7., 1, 1};
  const double equal[] = {0.348163655, 0.57510938, 0.723040851, 0.95, 0.986152043};
  const std::uint32_t counts[] = {1, 2, 3, 7, 10};
  constexpr int n = 100'000;
  for (const bool mode : {false, true})
    for (int c = 0; c < 5; ++c) {
      const double expected = (mode ? equal : unequal)[c];
      CHECK(std::abs(ProbabilisticFilter::admission_rate(mode, counts[c], 7) - expected) < 1e-8);
      ProbabilisticFilter filter(mode, SlotThresholds(7), 42);
      int admitted = 0;
      for (int i = 0; i < n; ++i) admitted += !filter.refuses(i, counts[c]);
      CHECK(std::abs(static_cast<double>(admitted) / n - expected) < 0.005);
    }
}

void chance_repeats_with_its_seed_and_is_off_without_a_threshold() {
  ProbabilisticFilter a(true, SlotThresholds(7), 1), b(true, SlotThresholds(7), 1),
      c(true, SlotThresholds(7), 2);
  const auto ids = random_ids(1000, 1);
  const auto first = refused(a, ids);
  CHECK(first == refused(b, ids));
  CHECK(first != refused(c, ids));
  CHECK(first != refused(a, ids));  // the draws go on
  ProbabilisticFilter off(false, SlotThresholds(0, {{1, 1'000'000}}), 1);
  CHECK(!off.refuses(5, 1));
  CHECK(off.refuses(std::int64_t{1} << 48, 1));
}

void speed() {
  SlidingFilter filter(50'000'000, 7, SlotThresholds(3));
  const auto ids = random_ids(2'000'000, 3);
  Mask mask(ids.size());
  const auto rate = [&](int threads) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t)
      running.emplace_back([&, t] {
        const std::size_t share = ids.size() / threads;
        filter.refuse(std::span(ids).subspan(t * share, share), {},
                      std::span(mask).subspan(t * share, share));
      });
    for (auto& thread : running) thread.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    return ids.size() / took.count() / 1e6;
  };
  const double fresh = rate(1), one = rate(1), two = rate(2);
  std::cout << "  " << fresh << " M new ids/s, " << one << " M known ids/s, two threads " << two << " M/s\n";
  std::size_t single = 0;
  const auto start = std::chrono::steady_clock::now();
  for (const auto id : ids) single += filter.refuses(id, 1);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::cout << "  one by one " << ids.size() / took.count() / 1e6 << " M/s (" << single << " refused)\n";
}

}  // namespace

int main() {
  return monolith::check::run({
      {"counts saturate at 15", counts_saturate_at_15},
      {"one element is one element however often seen", one_element_is_one_element_however_often_seen},
      {"no sighting leaves no trace", no_sighting_leaves_no_trace},
      {"a threshold of zero records nothing", a_threshold_of_zero_records_nothing},
      {"the first threshold sightings are refused, the next admits",
       the_first_threshold_sightings_are_refused_the_next_admits},
      {"gradient interception counts ids in order", gradient_interception_counts_ids_in_order},
      {"a batch answers as single calls do", a_batch_answers_as_single_calls_do},
      {"thresholds go by slot", thresholds_go_by_slot},
      {"thresholds it cannot count to are rejected", thresholds_it_cannot_count_to_are_rejected},
      {"small filters are made large enough and say so", small_filters_are_made_large_enough_and_say_so},
      {"the head moves on when full and old counts fade", the_head_moves_on_when_full_and_old_counts_fade},
      {"a million keys are counted as accurately as promised",
       a_million_keys_are_counted_as_accurately_as_promised},
      {"a restored filter goes on where the saved one was",
       a_restored_filter_goes_on_where_the_saved_one_was},
      {"what does not fit is not restored", what_does_not_fit_is_not_restored},
      {"threads lose no sighting", threads_lose_no_sighting},
      {"threads move the head while others save", threads_move_the_head_while_others_save},
      {"an unused filter takes no memory", an_unused_filter_takes_no_memory},
      {"chance admits at the promised rate", chance_admits_at_the_promised_rate},
      {"chance repeats with its seed and is off without a threshold",
       chance_repeats_with_its_seed_and_is_off_without_a_threshold},
      {"speed", speed},
  });
}
