#include "workers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>

namespace monolith {

struct Workers::Job {
  Job(const std::function<void(std::size_t)>& work, std::size_t tasks) : work(work), tasks(tasks) {}

  const std::function<void(std::size_t)>& work;
  const std::size_t tasks;
  std::atomic<std::size_t> next{0};
  int helpers = 0;  // guarded by Workers::mutex_
  std::mutex failure_mutex;
  std::exception_ptr failure;  // guarded by failure_mutex

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= tasks; }
};

Workers::Workers(int threads) {
  if (threads < 1) throw std::invalid_argument("workers: threads must be at least 1");
  team_.reserve(threads - 1);
  for (int i = 1; i < threads; ++i) team_.emplace_back([this] { serve(); });
}

Workers::~Workers() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (auto& thread : team_) thread.join();
}

void Workers::help(Job& job) {
  for (;;) {
    const std::size_t task = job.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= job.tasks) return;
    try {
      job.work(task);
    } catch (...) {
      std::lock_guard lock(job.failure_mutex);
      if (!job.failure) job.failure = std::current_exception();
      job.next.store(job.tasks, std::memory_order_relaxed);
    }
  }
}

void Workers::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job* job = jobs_.front();
    if (job->exhausted()) {
      jobs_.pop_front();
      continue;
    }
    ++job->helpers;
    lock.unlock();
    help(*job);
    lock.lock();
    // The job lives on its caller's stack, and the caller leaves once helpers is back at zero.
    if (--job->helpers == 0) left_.notify_all();
  }
}

void Workers::run(std::size_t tasks, const std::function<void(std::size_t)>& work) {
  Job job(work, tasks);
  if (team_.empty() || tasks < 2) {
    help(job);
  } else {
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(&job);
    }
    const std::size_t useful = std::min(team_.size(), tasks - 1);
    for (std::size_t i = 0; i < useful; ++i) wanted_.notify_one();
    help(job);
    std::unique_lock lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    left_.wait(lock, [&] { return job.helpers == 0; });
  }
  if (job.failure) std::rethrow_exception(job.failure);
}

}  // namespace monolith
