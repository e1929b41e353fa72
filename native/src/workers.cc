#include "workers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <stdexcept>

namespace monolith {
namespace {

// Waking a thread takes longer than the next job of the same call takes to arrive, so no thread sleeps at
// once. Another thread that wants the core gets it meanwhile.
constexpr std::chrono::microseconds kLinger{20};

template <class Done>
void linger(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kLinger;
  while (!done() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

}  // namespace

thread_local Workers::Party* Workers::party_ = nullptr;

Workers::Limit::Limit(Workers& workers, int threads)
    : party_{&workers, std::clamp(threads, 1, workers.threads()), 0}, before_(Workers::party_) {
  party_.room = party_.threads - 1;
  if (workers.own_party() == nullptr) Workers::party_ = &party_;
}

Workers::Limit::~Limit() {
  Workers::party_ = before_;
}

struct Workers::Job {
  Job(const std::function<void(std::size_t)>& work, std::size_t tasks, Party* party)
      : work(work), tasks(tasks), party(party) {}

  const std::function<void(std::size_t)>& work;
  const std::size_t tasks;
  Party* const party;  // within which it is run, or none
  std::atomic<std::size_t> next{0};
  std::atomic<int> helpers{0};  // changed under Workers::mutex_
  std::mutex failure_mutex;
  std::exception_ptr failure;  // guarded by failure_mutex

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= tasks; }
};

Workers::Workers(int threads) {
  if (threads < 1) throw std::invalid_argument("workers: threads must be at least 1");
  team_.reserve(threads - 1);
  try {
    for (int i = 1; i < threads; ++i) team_.emplace_back([this] { serve(); });
  } catch (...) {  // the machine gives no more threads; those there are must not outlive the team
    stop();
    throw;
  }
}

Workers::~Workers() {
  stop();
}

void Workers::stop() {
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
    if (!stopping_ && jobs_.empty()) {
      lock.unlock();
      linger([&] { return queued_.load(std::memory_order_relaxed) > 0; });
      lock.lock();
    }
    Job* job = nullptr;
    wanted_.wait(lock, [&] { return stopping_ || (job = find_job()) != nullptr; });
    if (stopping_) return;
    ++job->helpers;
    if (job->party != nullptr) --job->party->room;
    lock.unlock();
    party_ = job->party;
    help(*job);
    party_ = nullptr;
    lock.lock();
    if (job->party != nullptr) ++job->party->room;
    // The job lives on its caller's stack, and the caller leaves once helpers is back at zero.
    if (--job->helpers == 0) left_.notify_all();
  }
}

Workers::Job* Workers::find_job() {
  while (!jobs_.empty() && jobs_.front()->exhausted()) take_out(jobs_.front());
  const auto open = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) {
    return !job->exhausted() && (job->party == nullptr || job->party->room > 0);
  });
  return open != jobs_.end() ? *open : nullptr;
}

void Workers::take_out(Job* job) {
  jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
  queued_.store(jobs_.size(), std::memory_order_relaxed);
}

void Workers::run(std::size_t tasks, const std::function<void(std::size_t)>& work) {
  Job job(work, tasks, own_party());
  if (team_.empty() || tasks < 2 || at_hand() == 1) {
    help(job);
  } else {
    std::size_t useful = std::min(team_.size(), tasks - 1);
    {
      std::lock_guard lock(mutex_);
      if (job.party != nullptr) useful = std::min(useful, static_cast<std::size_t>(job.party->room));
      jobs_.push_back(&job);
      queued_.store(jobs_.size(), std::memory_order_relaxed);
    }
    for (std::size_t i = 0; i < useful; ++i) wanted_.notify_one();
    help(job);
    std::unique_lock lock(mutex_);
    take_out(&job);
    if (job.helpers != 0) {
      lock.unlock();
      linger([&] { return job.helpers.load(std::memory_order_relaxed) == 0; });
      lock.lock();
    }
    left_.wait(lock, [&] { return job.helpers == 0; });
  }
  if (job.failure) std::rethrow_exception(job.failure);
}

}  // namespace monolith
