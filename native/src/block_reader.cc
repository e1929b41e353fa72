#include "block_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace monolith {

BlockReader::BlockReader(int threads) : threads_(threads) {
  if (threads < 1) throw std::invalid_argument("block reader: needs at least one thread");
}

BlockReader::~BlockReader() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : team_) thread.join();
}

void BlockReader::work(Job& job) {
  for (;;) {
    const std::size_t at = job.next.fetch_add(1, std::memory_order_relaxed);
    if (at >= job.reads.size()) return;
    Read& read = job.reads[at];
    for (std::size_t done = 0; done < read.bytes;) {
      const ssize_t got =
          pread(read.descriptor, read.into + done, read.bytes - done, static_cast<off_t>(read.offset + done));
      if (got > 0) {
        done += static_cast<std::size_t>(got);
      } else if (got == 0 || errno != EINTR) {
        read.error = got == 0 ? -1 : errno;
        break;
      }
    }
  }
}

void BlockReader::run(std::span<Read> reads) {
  if (reads.empty()) return;
  Job job;
  job.reads = reads;
  if (reads.size() > 1) {
    std::unique_lock lock(mutex_);
    const std::size_t wanted = std::min<std::size_t>(reads.size(), static_cast<std::size_t>(threads_)) - 1;
    while (team_.size() < wanted) team_.emplace_back([this] { serve(); });
    jobs_.push_back(&job);
    lock.unlock();
    for (std::size_t i = 0; i < wanted; ++i) wanted_.notify_one();
    work(job);
    lock.lock();
    std::erase(jobs_, &job);
    left_.wait(lock, [&] { return job.helpers == 0; });
  } else {
    work(job);
  }
}

void BlockReader::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job& job = *jobs_.front();
    ++job.helpers;
    lock.unlock();
    work(job);
    lock.lock();
    // No read is left to take, so no other thread need join.
    std::erase(jobs_, &job);
    if (--job.helpers == 0) left_.notify_all();
  }
}

}  // namespace monolith
