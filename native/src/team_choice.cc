#include "team_choice.h"

#include <algorithm>
#include <bit>
#include <exception>

namespace monolith {
namespace {

constexpr double kWorse = 1.25;   // slower by this much, and fewer threads still are not tried
constexpr double kAsGood = 1.03;  // within this, fewer threads are better: another process may want the cores

}  // namespace

TeamChoice::TeamChoice(int threads) {
  for (int number = threads; number > 0; number /= 2) numbers_.push_back(number);
  for (Calls& calls : calls_) calls.last = numbers_.size() - 1;
}

int TeamChoice::next(std::size_t size) {
  if (size < kAlone || numbers_.size() == 1) return 1;
  std::lock_guard lock(mutex_);
  Calls& calls = calls_[std::bit_width(size)];
  if (calls.settled && ++calls.since > kAgain) {
    calls.settled = false;
    calls.trying = calls.chosen - std::min<std::size_t>(calls.chosen, 1);
    calls.last = std::min(calls.chosen + 1, numbers_.size() - 1);
    calls.times.clear();
  }
  return numbers_[calls.settled ? calls.chosen : calls.trying];
}

void TeamChoice::tell(std::size_t size, int threads, std::chrono::nanoseconds took) {
  std::lock_guard lock(mutex_);
  Calls& calls = calls_[std::bit_width(size)];
  // A concurrent call may have begun before the trial moved on.
  if (size < kAlone || calls.settled || threads != numbers_[calls.trying]) return;
  calls.times.resize(numbers_.size());
  double& best = calls.times[calls.trying];
  const double time =
      static_cast<double>(std::max<std::int64_t>(took.count(), 1)) / static_cast<double>(size);
  best = best == 0 ? time : std::min(best, time);
  if (++calls.tries < kTries) return;
  calls.tries = 0;
  const bool slower =
      calls.trying > 0 && calls.times[calls.trying - 1] != 0 && best > kWorse * calls.times[calls.trying - 1];
  if (slower || calls.trying == calls.last)
    settle(calls);
  else
    ++calls.trying;
}

void TeamChoice::settle(Calls& calls) const {
  double best = 0;
  for (const double time : calls.times)
    if (time != 0 && (best == 0 || time < best)) best = time;
  for (std::size_t i = 0; i < calls.times.size(); ++i)
    if (calls.times[i] != 0 && calls.times[i] <= kAsGood * best) calls.chosen = i;
  calls.settled = true;
  calls.since = 0;
}

MeasuredCall::MeasuredCall(Workers* workers, TeamChoice& choice, std::size_t size)
    : choice_(choice), size_(size), failures_(std::uncaught_exceptions()) {
  if (workers == nullptr || workers->threads() == 1 || workers->limited()) return;
  if (workers->fixed() > 0) {
    limit_.emplace(*workers, workers->fixed());
    return;
  }
  threads_ = choice.next(size);
  limit_.emplace(*workers, threads_);
  began_ = std::chrono::steady_clock::now();
}

MeasuredCall::~MeasuredCall() {
  if (threads_ > 0 && std::uncaught_exceptions() == failures_)
    choice_.tell(size_, threads_, std::chrono::steady_clock::now() - began_);
}

}  // namespace monolith
