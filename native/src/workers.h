// Workers: a fixed team of threads that share one batch at a time.
//
// The calling thread always works too, so a call makes progress even when every
// worker is busy elsewhere, and a team of one starts no thread at all. Tasks are
// assigned one by one: a core that is slow or busy simply takes fewer. A thread without
// work stays awake for a moment: calls come in a row.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace monolith {

class Workers {
 public:
  // `threads` counts the caller: 1 runs everything where it is called.
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const { return static_cast<int>(team_.size()) + 1; }

  // How many threads measured calls have from now on, at most all; 0, as at first, lets a TeamChoice say.
  void fix(int threads) { fixed_.store(threads, std::memory_order_relaxed); }
  int fixed() const { return fixed_.load(std::memory_order_relaxed); }

  // While it lives, what its thread runs here has at most `threads` threads, with all that this runs in turn.
  // Within another limit of the same team it changes nothing.
  class Limit;
  // How many threads may take part in what this thread runs next.
  int at_hand() const { return limited() ? party_->threads : threads(); }
  bool limited() const { return own_party() != nullptr; }

  // Runs work(0) .. work(tasks - 1), each exactly once, on up to `threads()` threads, and returns when
  // all are done. The first exception is rethrown here; tasks not yet begun are then dropped.
  void run(std::size_t tasks, const std::function<void(std::size_t)>& work);

 private:
  struct Job;
  // The threads that work for one limited call, the caller among them.
  struct Party {
    const Workers* team;
    int threads;
    int room;  // for how many more
  };
  static thread_local Party* party_;  // what this thread works within, or none
  Party* own_party() const { return party_ != nullptr && party_->team == this ? party_ : nullptr; }
  void serve();
  void stop();  // ends and joins all threads
  static void help(Job& job);
  // Both with mutex_ held.
  Job* find_job();  // that one more may join
  void take_out(Job* job);

  std::atomic<int> fixed_{0};
  std::mutex mutex_;  // guards jobs_, stopping_, the helper count of every queued job and the room in parties
  std::condition_variable wanted_;
  std::condition_variable left_;
  std::deque<Job*> jobs_;
  std::atomic<std::size_t> queued_{0};  // how many jobs there are, readable without the mutex
  bool stopping_ = false;
  std::vector<std::thread> team_;
};

class Workers::Limit {
 public:
  Limit(Workers& workers, int threads);
  ~Limit();
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  Party party_;
  Party* const before_;
};

// Cuts [0, count) into tasks of `grain` and hands them to the workers, if there are any: each(begin, end).
template <class Each>
void spread_out(Workers* workers, std::size_t count, std::size_t grain, Each&& each) {
  const std::size_t tasks = (count + grain - 1) / grain;
  if (workers == nullptr || tasks < 2) {
    if (count > 0) each(std::size_t{0}, count);
    return;
  }
  workers->run(tasks, [&](std::size_t task) { each(task * grain, std::min(count, (task + 1) * grain)); });
}

}  // namespace monolith
