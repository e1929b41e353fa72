// RowUses: how often rows of a table were used lately, by row number.
//
// A count goes up by two, to 3 at most, with each call that uses the row, and down by one whenever the search
// for idle rows passes it (a clock with several chances). A new row starts at 0: rows of a scan over cold IDs
// leave again before rows that are used again and again, whatever the length of the scan.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace monolith {

// Laid out as the arenas are. Threads may use different rows at once.
class RowUses {
 public:
  explicit RowUses(std::uint8_t call = 1) : now_(call) {}
  RowUses(const RowUses&) = delete;
  ~RowUses() {
    for (auto& arena : arenas_) std::free(arena.load());
  }

  // A new call: rows of the one before may be idle now.
  void begin() { now_ = now_ % 255 + 1; }
  void note(std::uint32_t row) {
    Use& use = at(row);
    if (use.call == now_) return;  // an ID of the batch that came again
    use.call = now_;
    use.count = static_cast<std::uint8_t>(std::min(use.count + 2, +kMost));
  }
  void copy(RowUses& other, std::uint32_t from, std::uint32_t to) { at(to) = other.at(from); }
  std::uint8_t call() const { return now_; }
  void start(std::uint32_t row) { at(row) = {0, now_}; }
  // Whether the row may go. One that was used has a chance less the next time.
  bool idle(std::uint32_t row) {
    Use& use = at(row);
    if (use.call == now_) return false;
    if (use.count == 0) return true;
    --use.count;
    return false;
  }

 private:
  struct Use {
    std::uint8_t count;
    std::uint8_t call;
  };
  static constexpr int kMost = 3;

  Use& at(std::uint32_t row) {
    const int arena = 31 - std::countl_zero(row);
    Use* uses = arenas_[arena].load(std::memory_order_acquire);
    if (uses == nullptr) uses = make(arena);
    return uses[row - (1u << arena)];
  }

  Use* make(int arena) {
    auto* const fresh = static_cast<Use*>(std::calloc(std::size_t{1} << arena, sizeof(Use)));
    if (fresh == nullptr) throw std::bad_alloc();
    Use* before = nullptr;
    if (arenas_[arena].compare_exchange_strong(before, fresh)) return fresh;
    std::free(fresh);
    return before;
  }

  std::atomic<Use*> arenas_[32]{};
  std::uint8_t now_;
};

}  // namespace monolith
