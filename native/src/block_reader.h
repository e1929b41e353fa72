// BlockReader: reads many blocks of files at once, and has each worked on by the thread that read it. So what
// is read needs no memory but a small buffer for each thread, and checksums do not wait for each other.
//
// A disk answers one read in 50 to 100 us and 32 to 128 of them in hardly more, so what counts is how many
// are under way. With as many, threads that call pread are as fast as io_uring (decision 0087), and they work
// where io_uring is forbidden, as in most containers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace monolith {

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Aligned = std::unique_ptr<std::byte, Free>;
Aligned aligned(std::size_t bytes);  // to 4096

// Thread-safe. Threads are started by the first call that has work for them, and sleep between calls. Calls
// of several threads read side by side, with as many threads as they have reads together.
class BlockReader {
 public:
  struct Read {
    int descriptor;
    std::uint64_t offset;
    std::size_t bytes;
    std::byte* into;  // aligned to 4096; null for a buffer of the thread that reads, until `done` returns
    int error = 0;    // errno, or -1 for a file that ends too early
  };
  // Called by several threads at once, with the number of a read and its bytes. If one throws, so does run(),
  // and reads that have not begun are left out.
  using Done = std::function<void(std::size_t, const std::byte*)>;

  explicit BlockReader(int threads = 32);
  ~BlockReader();
  BlockReader(const BlockReader&) = delete;

  // Returns when all are done; each says how it went.
  void run(std::span<Read> reads, const Done& done = {});

  int threads() const { return threads_; }

 private:
  struct Job {
    Job(std::span<Read> reads, const Done& done) : reads(reads), done(done) {}
    std::span<Read> reads;
    const Done& done;
    std::atomic<std::size_t> next{0};
    std::size_t helpers = 0;    // threads at work on it; guarded by mutex_, as is
    std::exception_ptr failed;  // the first
  };
  // Memory for the reads of one thread, which grows with them.
  struct Buffer {
    Aligned memory;
    std::size_t bytes = 0;
  };
  void work(Job& job, Buffer& buffer);
  void serve();

  const int threads_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wanted_, left_;
  std::deque<Job*> jobs_;
  std::vector<Buffer> buffers_;  // for threads that call run()
  std::size_t helpers_ = 0;      // that calls under way have work for, together
  bool stopping_ = false;
  std::vector<std::thread> team_;
};

}  // namespace monolith
