#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "touched_key_set.h"

namespace {

using namespace monolith;
using Keys = std::vector<std::int64_t>;

Keys range(std::int64_t from, std::int64_t to) {
  Keys keys(static_cast<std::size_t>(to - from));
  std::iota(keys.begin(), keys.end(), from);
  return keys;
}

Keys sorted(Keys keys) {
  std::sort(keys.begin(), keys.end());
  return keys;
}

void steal_returns_what_was_inserted_once() {
  TouchedKeySet set(1000);
  CHECK(set.steal().empty());
  CHECK_EQUAL(set.insert(range(0, 1000)), 0u);
  CHECK_EQUAL(set.insert(range(500, 1000)), 0u);
  CHECK_EQUAL(set.size(), 1000u);
  CHECK(sorted(set.steal()) == range(0, 1000));
  CHECK(set.steal().empty());
  CHECK_EQUAL(set.size(), 0u);
  CHECK_EQUAL(set.insert(range(3, 5)), 0u);
  CHECK(sorted(set.steal()) == range(3, 5));
}

void a_set_past_its_capacity_is_emptied_and_says_so() {
  TouchedKeySet set(1000);
  CHECK_EQUAL(set.insert(range(0, 1005)), 1001u);
  CHECK(sorted(set.steal()) == range(1001, 1005));
  CHECK_EQUAL(set.insert(range(0, 1001)), 0u);  // one more than capacity is still held
  CHECK_EQUAL(set.size(), 1001u);
  CHECK_EQUAL(set.insert(Keys{5}), 1001u);  // the size is looked at before the key
  CHECK(set.steal() == Keys{5});
  CHECK_EQUAL(set.lost(), 2002u);  // in all, so that whoever asks seldom misses none
  set.lose(3);
  CHECK_EQUAL(set.lost(), 2005u);
}

void the_smallest_sets_work() {
  TouchedKeySet none(0);
  CHECK_EQUAL(none.insert(Keys{1, 1, 2}), 2u);
  CHECK(none.steal() == Keys{2});
  TouchedKeySet one(1);
  CHECK_EQUAL(one.insert(Keys{1, 1, 2, 3}), 2u);
  CHECK(one.steal() == Keys{3});
  CHECK_EQUAL(one.insert(Keys{}), 0u);
  CHECK_THROWS(std::invalid_argument, "capacity", TouchedKeySet(~std::size_t{0}));
}

void every_int64_is_a_key() {
  TouchedKeySet set(10);
  const Keys keys{std::numeric_limits<std::int64_t>::min(), -1, 0, 1,
                  std::numeric_limits<std::int64_t>::max()};
  set.insert(keys);
  set.insert(keys);
  CHECK_EQUAL(set.size(), 5u);
  CHECK(sorted(set.steal()) == keys);
  CHECK(set.steal().empty());
}

void random_calls_answer_as_a_plain_set_does() {
  for (const std::size_t capacity : {0, 1, 7, 100, 3000}) {
    TouchedKeySet set(capacity);
    std::set<std::int64_t> plain;
    std::mt19937_64 random(capacity);
    for (int call = 0; call < 300; ++call) {
      if (random() % 20 == 0) {
        CHECK(sorted(set.steal()) == Keys(plain.begin(), plain.end()));
        plain.clear();
      }
      Keys keys(random() % 4000);
      std::size_t dropped = 0;
      for (auto& key : keys) {
        key = static_cast<std::int64_t>(random() % (2 * capacity + 3)) - 2;
        if (plain.size() > capacity) {
          dropped += plain.size();
          plain.clear();
        }
        plain.insert(key);
      }
      CHECK_EQUAL(set.insert(keys), dropped);
      CHECK_EQUAL(set.size(), plain.size());
    }
  }
}

void ten_threads_clear_exactly_twenty_times() {
  constexpr std::int64_t kCapacity = 20'000, kTotal = 20 * kCapacity + 10'000;
  constexpr std::size_t kDropped = 20 * (kCapacity + 1);
  for (const std::size_t batch : {1, 37, 5000}) {
    TouchedKeySet set(kCapacity);
    std::atomic<std::size_t> dropped{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 10; ++t)
      threads.emplace_back([&, t] {
        const Keys mine = range(t * kTotal / 10, (t + 1) * kTotal / 10);
        for (std::size_t i = 0; i < mine.size(); i += batch)
          dropped += set.insert(std::span(mine).subspan(i, std::min(batch, mine.size() - i)));
      });
    for (auto& thread : threads) thread.join();
    CHECK_EQUAL(dropped.load(), kDropped);
    CHECK_EQUAL(set.size(), kTotal - kDropped);
    CHECK_EQUAL(set.steal().size(), kTotal - kDropped);
  }
}

void threads_neither_lose_nor_duplicate_keys_while_others_steal() {
  constexpr int kThreads = 4;
  constexpr std::int64_t kKeys = 60'000;
  TouchedKeySet set(2 * kKeys);
  std::atomic<std::size_t> dropped{0};
  std::vector<Keys> stolen(1);
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {  // neighbours overlap by half
      const Keys mine = range(t * kKeys / 4, t * kKeys / 4 + kKeys / 2);
      for (std::size_t i = 0; i < mine.size(); i += 100)
        dropped += set.insert(std::span(mine).subspan(i, 100));
    });
  std::thread thief([&] {
    while (!done) stolen.push_back(set.steal());
  });
  for (auto& thread : threads) thread.join();
  done = true;
  thief.join();
  stolen.push_back(set.steal());
  CHECK_EQUAL(dropped.load(), 0u);
  std::set<std::int64_t> seen;
  for (auto& keys : stolen) {
    const std::set<std::int64_t> once(keys.begin(), keys.end());
    CHECK_EQUAL(once.size(), keys.size());
    seen.insert(once.begin(), once.end());
  }
  CHECK(Keys(seen.begin(), seen.end()) == range(0, kKeys * 3 / 4 + kKeys / 2));
}

void threads_inserting_the_same_keys_hold_each_once() {
  TouchedKeySet set(50'000);
  const Keys keys = range(-25'000, 25'000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < keys.size(); i += 500) set.insert(std::span(keys).subspan(i, 500));
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQUAL(set.size(), keys.size());
  CHECK(sorted(set.steal()) == keys);
}

void speed() {
  TouchedKeySet set;
  std::mt19937_64 random(1);
  Keys keys(2'000'000);
  for (auto& key : keys) key = static_cast<std::int64_t>(random());
  const auto rate = [&](int threads) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> running;
    const std::size_t share = keys.size() / threads;
    for (int t = 0; t < threads; ++t)
      running.emplace_back([&, t] {
        for (std::size_t i = 0; i < share; i += 4000)
          set.insert(std::span(keys).subspan(t * share + i, 4000));
      });
    for (auto& thread : running) thread.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    return keys.size() / took.count() / 1e6;
  };
  const double fresh = rate(1), known = rate(1);
  const auto start = std::chrono::steady_clock::now();
  const std::size_t stolen = set.steal().size();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::cout << "  " << fresh << " M new keys/s, " << known << " M known keys/s, steal of " << stolen << " in "
            << took.count() * 1e3 << " ms, two threads " << rate(2) << " M new keys/s\n";
}

}  // namespace

int main() {
  return monolith::check::run({
      {"steal returns what was inserted, once", steal_returns_what_was_inserted_once},
      {"a set past its capacity is emptied and says so", a_set_past_its_capacity_is_emptied_and_says_so},
      {"the smallest sets work", the_smallest_sets_work},
      {"every int64 is a key", every_int64_is_a_key},
      {"random calls answer as a plain set does", random_calls_answer_as_a_plain_set_does},
      {"ten threads clear exactly twenty times", ten_threads_clear_exactly_twenty_times},
      {"threads neither lose nor duplicate keys while others steal",
       threads_neither_lose_nor_duplicate_keys_while_others_steal},
      {"threads inserting the same keys hold each once", threads_inserting_the_same_keys_hold_each_once},
      {"speed", speed},
  });
}
