#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "team_choice.h"
#include "workers.h"

namespace {

using namespace monolith;
using std::chrono::nanoseconds;

constexpr std::size_t kSize = 50'000;

// Calls as many times as a trial may take; returns what was tried in order, each once.
std::vector<int> settle(TeamChoice& choice, std::size_t size, const std::function<int(int)>& nanoseconds_of) {
  std::vector<int> tried;
  for (int call = 0; call < 6 * TeamChoice::kTries; ++call) {
    const int threads = choice.next(size);
    if (tried.empty() || tried.back() != threads) tried.push_back(threads);
    choice.tell(size, threads, nanoseconds(nanoseconds_of(threads)));
  }
  return tried;
}

void fewer_are_tried_while_that_helps() {
  TeamChoice choice(16);
  const auto time = [](int threads) { return threads == 4 ? 100 : threads < 4 ? 1000 : 200; };
  CHECK(settle(choice, kSize, time) == (std::vector<int>{16, 8, 4, 2, 4}));
  CHECK_EQUAL(choice.next(kSize), 4);
}

void large_calls_keep_all_without_trying_everything() {
  TeamChoice choice(16);
  CHECK(settle(choice, kSize, [](int threads) { return 16000 / threads; }) == (std::vector<int>{16, 8, 16}));
}

void of_equals_the_smaller_team_is_taken() {
  TeamChoice choice(6);
  CHECK(settle(choice, kSize, [](int) { return 1000; }) == (std::vector<int>{6, 3, 1}));
}

void the_best_of_some_calls_counts() {
  TeamChoice choice(2);
  int calls = 0;
  settle(choice, kSize, [&](int threads) { return ++calls % 4 != 2 ? 1'000'000 : 100 * threads; });
  CHECK_EQUAL(choice.next(kSize), 1);
}

void sizes_are_told_apart_and_small_ones_work_alone() {
  TeamChoice choice(8);
  settle(choice, 2000, [](int threads) { return 100 * threads; });
  settle(choice, 1'000'000, [](int threads) { return 100'000 / threads; });
  CHECK_EQUAL(choice.next(2000), 1);
  CHECK_EQUAL(choice.next(1500), 1);
  CHECK_EQUAL(choice.next(1'000'000), 8);
  CHECK_EQUAL(choice.next(TeamChoice::kAlone - 1), 1);
}

void what_is_settled_is_put_to_the_test_again() {
  TeamChoice choice(16);
  settle(choice, kSize, [](int threads) { return threads == 4 ? 100 : 200; });
  std::set<int> tried;
  for (std::size_t call = 0; call < TeamChoice::kAgain + 100; ++call) {
    const int threads = choice.next(kSize);
    tried.insert(threads);
    choice.tell(kSize, threads, nanoseconds(threads == 8 ? 50 : 100));
  }
  CHECK_EQUAL(choice.next(kSize), 8);
  CHECK(tried == (std::set<int>{8, 4}));  // four were slower than eight by far: nobody asked for two
}

// How many threads worked on tasks at the same time, at most, and how many in all.
struct Crowd {
  std::atomic<int> now{0}, most{0};
  std::atomic<int> done{0};
  void work() {
    const int here = ++now;
    int known = most.load();
    while (here > known && !most.compare_exchange_weak(known, here)) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --now;
    ++done;
  }
};

void a_limit_holds_for_all_that_a_call_runs() {
  Workers workers(8);
  Crowd crowd;
  {
    const Workers::Limit limit(workers, 3);
    CHECK_EQUAL(workers.at_hand(), 3);
    workers.run(6, [&](std::size_t) { workers.run(6, [&](std::size_t) { crowd.work(); }); });
    const Workers::Limit wider(workers, 8);
    CHECK_EQUAL(workers.at_hand(), 3);
  }
  CHECK_EQUAL(crowd.done.load(), 36);
  CHECK(crowd.most.load() <= 3);
  CHECK_EQUAL(workers.at_hand(), 8);
}

void a_limit_of_one_wakes_nobody() {
  Workers workers(4);
  const Workers::Limit limit(workers, 1);
  const auto here = std::this_thread::get_id();
  bool alone = true;
  workers.run(50, [&](std::size_t) { alone &= std::this_thread::get_id() == here; });
  CHECK(alone);
}

void others_are_not_limited() {
  Workers workers(4), others(4);
  const Workers::Limit limit(workers, 1);
  CHECK_EQUAL(others.at_hand(), 4);
  int at_hand = 0;
  std::thread([&] { at_hand = workers.at_hand(); }).join();
  CHECK_EQUAL(at_hand, 4);
}

void limited_calls_from_many_threads_all_finish() {
  Workers workers(4);
  std::atomic<int> done{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&, c] {
      for (int turn = 0; turn < 50; ++turn) {
        const Workers::Limit limit(workers, 1 + c);
        workers.run(8, [&](std::size_t) { workers.run(3, [&](std::size_t) { ++done; }); });
      }
    });
  for (auto& caller : callers) caller.join();
  CHECK_EQUAL(done.load(), 4 * 50 * 8 * 3);
}

void measured_calls_have_as_many_as_the_choice_says() {
  Workers workers(4);
  TeamChoice choice(4);
  std::vector<int> seen;
  for (int call = 0; call < 2 * TeamChoice::kTries; ++call) {
    const MeasuredCall measured(&workers, choice, kSize);
    seen.push_back(workers.at_hand());
  }
  CHECK_EQUAL(seen.front(), 4);
  CHECK_EQUAL(seen[TeamChoice::kTries], 2);
  workers.fix(3);
  const MeasuredCall fixed(&workers, choice, kSize), without(nullptr, choice, kSize);
  CHECK_EQUAL(workers.at_hand(), 3);
}

void a_call_that_fails_does_not_count() {
  Workers workers(2);
  TeamChoice choice(2);
  for (int call = 0; call < 10; ++call) try {
      const MeasuredCall measured(&workers, choice, kSize);
      throw std::runtime_error("no");
    } catch (const std::runtime_error&) {
    }
  CHECK_EQUAL(choice.next(kSize), 2);
}

}  // namespace

int main() {
  return check::run({
      {"fewer are tried while that helps", fewer_are_tried_while_that_helps},
      {"large calls keep all without trying everything", large_calls_keep_all_without_trying_everything},
      {"of equals the smaller team is taken", of_equals_the_smaller_team_is_taken},
      {"the best of some calls counts", the_best_of_some_calls_counts},
      {"sizes are told apart and small ones work alone", sizes_are_told_apart_and_small_ones_work_alone},
      {"what is settled is put to the test again", what_is_settled_is_put_to_the_test_again},
      {"a limit holds for all that a call runs", a_limit_holds_for_all_that_a_call_runs},
      {"a limit of one wakes nobody", a_limit_of_one_wakes_nobody},
      {"others are not limited", others_are_not_limited},
      {"limited calls from many threads all finish", limited_calls_from_many_threads_all_finish},
      {"measured calls have as many as the choice says", measured_calls_have_as_many_as_the_choice_says},
      {"a call that fails does not count", a_call_that_fails_does_not_count},
  });
}
