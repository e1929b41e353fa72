// RowUses: which rows of a table were used again, by row number.
//
// A row that comes in is new until a later call uses it: then it is settled. The search for idle rows takes
// new rows first, and so a scan over cold IDs takes the place of its own rows and of no others, however long
// it is. Settled rows age only while less than kNewShare of the rows are new, or if there are not enough of
// those: then a count goes down by one each time the search passes (a clock with several chances). A use
// raises it by two, to 3 at most. A row that comes back soon after it left is settled at once: rows whose
// uses are far apart would otherwise always leave before the second.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace monolith {

// Laid out as the arenas are. Threads may use different rows at once.
class RowUses {
 public:
  RowUses() = default;
  // For the same rows under other numbers, which are copied one by one.
  explicit RowUses(RowUses& other) : left_(std::move(other.left_)), new_(other.new_), now_(other.now_) {}
  ~RowUses() {
    for (auto& arena : arenas_) std::free(arena.load());
  }

  // A new call: rows of the one before may be idle now.
  void begin() { now_ = now_ % 255 + 1; }
  void note(std::uint32_t row) {
    Use& use = at(row);
    if (use.call == now_) return;  // an ID of the batch that came again
    use.call = now_;
    use.count = static_cast<std::uint8_t>(kSettled | std::min((use.count & kChances) + 2, +kChances));
  }
  void copy(RowUses& other, std::uint32_t from, std::uint32_t to) { at(to) = other.at(from); }
  // A row comes in.
  void start(std::uint32_t row, std::uint64_t hash) {
    at(row) = {left_.empty() || left_[place(hash)] != mark(hash) ? std::uint8_t{0} : kSettled, now_};
  }
  // A row is chosen to leave.
  void leave(std::uint32_t row, std::uint64_t hash) {
    at(row) = {0, now_};  // not twice
    left_[place(hash)] = mark(hash);
  }
  // Called before rows are sought, with how many there are: about as many that have left are remembered.
  void remember(std::size_t rows) {
    if (rows > left_.size() || 4 * rows < left_.size()) left_.assign(std::bit_ceil(rows), 0);
  }
  // Whether the row may go. `all`: settled rows age, whatever the share of new ones is.
  bool idle(std::uint32_t row, bool all) {
    Use& use = at(row);
    const bool settled = (use.count & kSettled) != 0;
    new_ += ((settled ? 0.0F : 1.0F) - new_) / kLooked;
    if (use.call == now_) return false;
    if (!settled) return true;
    if (!all && new_ >= kNewShare) return false;
    if ((use.count & kChances) == 0) return true;
    --use.count;
    return false;
  }

 private:
  struct Use {
    std::uint8_t count;  // chances, and kSettled
    std::uint8_t call;
  };
  static constexpr std::uint8_t kChances = 3, kSettled = 4;
  static constexpr float kNewShare = 0.25F;
  static constexpr float kLooked = 256;  // rows, lately passed, whose share of new ones counts

  std::size_t place(std::uint64_t hash) const { return hash & (left_.size() - 1); }
  static std::uint16_t mark(std::uint64_t hash) { return static_cast<std::uint16_t>(hash >> 48 | 1); }

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
  std::vector<std::uint16_t> left_;  // marks of rows that left, each where its hash says
  float new_ = 1;                    // the share of new rows
  std::uint8_t now_ = 1;
};

}  // namespace monolith
