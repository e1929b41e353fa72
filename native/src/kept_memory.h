// KeptMemory: large blocks that are used again.
//
// Fresh memory is dear: the system zeroes every page at its first touch, and threads
// that touch many at once wait for each other there. A step needs the same few large
// blocks as the step before it, so blocks that come back are kept for the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.h"

namespace monolith {

// Safe from any thread. Held by std::shared_ptr: blocks keep it alive.
class KeptMemory : public std::enable_shared_from_this<KeptMemory> {
 public:
  static constexpr std::size_t kLarge = 1 << 20;  // smaller blocks are the allocator's
  static constexpr std::uint64_t kTurns = 64;     // an idle block is freed after so many takes

  // Memory on a line of its own, not initialised; given back when this goes.
  class Block {
   public:
    Block() = default;
    ~Block();
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept;
    std::byte* data() const { return data_; }

   private:
    friend class KeptMemory;
    std::byte* data_ = nullptr;
    std::unique_ptr<Region> region_;     // none for a small block
    std::shared_ptr<KeptMemory> owner_;  // of the region
  };

  Block take(std::size_t bytes);
  std::size_t bytes() const;  // idle, ready for the next take

 private:
  struct Idle {
    std::unique_ptr<Region> region;
    std::uint64_t since;
  };
  void give_back(std::unique_ptr<Region> region);

  mutable std::mutex mutex_;  // guards what follows
  std::uint64_t turn_ = 0;
  std::vector<Idle> idle_;
};

// An array of numbers in such memory, not initialised.
template <class T>
class KeptArray {
 public:
  KeptArray() = default;
  KeptArray(KeptMemory& memory, std::size_t size) : block_(memory.take(size * sizeof(T))), size_(size) {}
  T* data() const { return reinterpret_cast<T*>(block_.data()); }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) const { return data()[i]; }

 private:
  KeptMemory::Block block_;
  std::size_t size_ = 0;
};

}  // namespace monolith
