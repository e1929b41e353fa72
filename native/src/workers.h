// Workers: a fixed team of threads that share one batch at a time.
//
// The calling thread always works too, so a call makes progress even when every
// worker is busy elsewhere, and a team of one starts no thread at all. Tasks are
// handed out one by one: a core that is slow or busy simply takes fewer. Whoever has
// nothing to do stays awake for a moment: calls come in a row.
#pragma once

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

  // Runs work(0) .. work(tasks - 1), each exactly once, on up to `threads()` threads, and returns when
  // all are done. The first exception is rethrown here; tasks not yet begun are then dropped.
  void run(std::size_t tasks, const std::function<void(std::size_t)>& work);

 private:
  struct Job;
  void serve();
  void stop();  // ends and joins all threads
  static void help(Job& job);
  void take_out(Job* job);  // with mutex_ held

  std::mutex mutex_;  // guards jobs_, stopping_ and the helper count of every queued job
  std::condition_variable wanted_;
  std::condition_variable left_;
  std::deque<Job*> jobs_;
  std::atomic<std::size_t> queued_{0};  // how many jobs there are, for whoever has not got the mutex
  bool stopping_ = false;
  std::vector<std::thread> team_;
};

}  // namespace monolith
