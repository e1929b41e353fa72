#include "block_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <utility>

namespace monolith {

Aligned aligned(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  auto* const memory =
      static_cast<std::byte*>(std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage));
  if (memory == nullptr) throw std::bad_alloc();
  return Aligned(memory);
}

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

void BlockReader::work(Job& job, Buffer& buffer) {
  try {
    for (;;) {
      const std::size_t at = job.next.fetch_add(1, std::memory_order_relaxed);
      if (at >= job.reads.size()) return;
      Read& read = job.reads[at];
      if (read.into == nullptr && buffer.bytes < read.bytes) {
        buffer.memory = aligned(read.bytes);
        buffer.bytes = read.bytes;
      }
      std::byte* const into = read.into != nullptr ? read.into : buffer.memory.get();
      for (std::size_t done = 0; done < read.bytes;) {
        const ssize_t got =
            pread(read.descriptor, into + done, read.bytes - done, static_cast<off_t>(read.offset + done));
        if (got > 0) {
          done += static_cast<std::size_t>(got);
        } else if (got == 0 || errno != EINTR) {
          read.error = got == 0 ? -1 : errno;
          break;
        }
      }
      if (job.done) job.done(at, into);
    }
  } catch (...) {
    job.next.store(job.reads.size());
    std::lock_guard lock(mutex_);
    if (job.failed == nullptr) job.failed = std::current_exception();
  }
}

void BlockReader::run(std::span<Read> reads, const Done& done) {
  if (reads.empty()) return;
  Job job(reads, done);
  Buffer buffer;
  std::unique_lock lock(mutex_);
  if (!buffers_.empty()) {
    buffer = std::move(buffers_.back());
    buffers_.pop_back();
  }
  if (reads.size() > 1) {
    const std::size_t wanted = std::min<std::size_t>(reads.size(), static_cast<std::size_t>(threads_)) - 1;
    helpers_ += wanted;
    const std::size_t useful = std::min(helpers_, static_cast<std::size_t>(threads_) - 1);
    while (team_.size() < useful) team_.emplace_back([this] { serve(); });
    jobs_.push_back(&job);
    lock.unlock();
    for (std::size_t i = 0; i < wanted; ++i) wanted_.notify_one();
    work(job, buffer);
    lock.lock();
    std::erase(jobs_, &job);
    left_.wait(lock, [&] { return job.helpers == 0; });
    helpers_ -= wanted;
  } else {
    lock.unlock();
    work(job, buffer);
    lock.lock();
  }
  buffers_.push_back(std::move(buffer));
  if (job.failed != nullptr) std::rethrow_exception(job.failed);
}

void BlockReader::serve() {
  Buffer buffer;
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job& job = *jobs_.front();
    ++job.helpers;
    lock.unlock();
    work(job, buffer);
    lock.lock();
    // No read is left to take, so no other thread need join.
    std::erase(jobs_, &job);
    if (--job.helpers == 0) left_.notify_all();
  }
}

}  // namespace monolith
