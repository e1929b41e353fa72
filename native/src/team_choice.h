// TeamChoice: how many threads one kind of call is worth, found out by trying.
//
// More threads are not always faster: each must be woken, and others may have the
// cores, torch's own threads above all, which wait busily between its operations.
// So the first calls of a size are made with all threads, then with half of them, and
// so on while that helps; the fastest number stays, and is put to the test again
// after many calls. Calls are told apart by the power of two that their size has.
//
//   trying n, n/2, ... --(slower by far, or no fewer)--> settled --(kAgain calls)--> trying
//                                                         twice as many, as many, half as many
//
// Outcomes must not depend on the number, since it depends on the clock.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

#include "workers.h"

namespace monolith {

// Safe from any thread.
class TeamChoice {
 public:
  static constexpr int kTries = 4;             // calls with one number; the fastest of them counts
  static constexpr std::size_t kAgain = 1000;  // calls until what is settled is tried again
  static constexpr std::size_t kAlone = 1024;  // below this size no thread is worth waking

  explicit TeamChoice(int threads);  // of the whole team

  // How many threads the next call of this size should have.
  int next(std::size_t size);
  // How long a call took that had so many.
  void tell(std::size_t size, int threads, std::chrono::nanoseconds took);

 private:
  struct Calls {                // of one power of two
    std::vector<double> times;  // per item and number of threads, the best of a trial; 0 for none
    std::size_t chosen = 0, trying = 0, last = 0;
    int tries = 0;
    bool settled = false;
    std::size_t since = 0;  // calls since it was settled
  };
  void settle(Calls& calls) const;

  std::vector<int> numbers_;  // of threads: all, half of them, ..., one
  std::mutex mutex_;          // guards calls_
  std::array<Calls, 65> calls_;
};

// One call of a kind: while it lives, its thread has as many helpers as the choice says, and its time counts.
class MeasuredCall {
 public:
  // Nothing is measured where `workers` are none, are fixed, or are at work for such a call already.
  MeasuredCall(Workers* workers, TeamChoice& choice, std::size_t size);
  ~MeasuredCall();
  MeasuredCall(const MeasuredCall&) = delete;
  MeasuredCall& operator=(const MeasuredCall&) = delete;

 private:
  TeamChoice& choice_;
  const std::size_t size_;
  const int failures_;  // under way when it began
  int threads_ = 0;     // 0: not measured
  std::chrono::steady_clock::time_point began_;
  std::optional<Workers::Limit> limit_;
};

}  // namespace monolith
