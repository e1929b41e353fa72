// BlockReader: reads many blocks of files at once.
//
// A disk answers one read in 50 to 100 us and 32 to 128 of them in hardly more, so what counts is how many
// are under way. Threads that call pread reach nine tenths of what io_uring does with the same depth
// (decision 0087), and work where io_uring is forbidden, as in most containers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace monolith {

// Thread-safe. Threads are started by the first call that has work for them, and sleep between calls.
class BlockReader {
 public:
  struct Read {
    int descriptor;
    std::uint64_t offset;
    std::size_t bytes;
    std::byte* into;  // aligned to 4096
    int error = 0;    // errno, or -1 for a file that ends too early
  };

  explicit BlockReader(int threads = 32);
  ~BlockReader();
  BlockReader(const BlockReader&) = delete;

  // Returns when all are done; each says how it went.
  void run(std::span<Read> reads);

  int threads() const { return threads_; }

 private:
  struct Job {
    std::span<Read> reads;
    std::atomic<std::size_t> next{0};
    std::size_t helpers = 0;  // threads at work on it; guarded by mutex_
  };
  static void work(Job& job);
  void serve();

  const int threads_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wanted_, left_;
  std::deque<Job*> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> team_;
};

}  // namespace monolith
