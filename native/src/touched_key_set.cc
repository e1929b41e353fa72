#include "touched_key_set.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "hash.h"

namespace monolith {
namespace {

constexpr std::size_t kChunk = 1024;  // ids that claim room together
constexpr std::size_t kPrefetchAhead = 16;
constexpr std::size_t kLineSlots = 8;  // slots of a cache line, which share a bit

std::uint64_t* words(const Region& region) {
  return reinterpret_cast<std::uint64_t*>(region.data());
}

// 1.2 slots per key, rounded up; at least one slot stays free, which ends every search.
std::size_t slots_for(std::size_t capacity) {
  constexpr std::size_t kMost = std::size_t{1} << 40;
  if (capacity > kMost)
    throw std::invalid_argument("touched key set: a capacity of " + std::to_string(capacity) +
                                " keys; at most " + std::to_string(kMost) + " will do");
  return std::bit_ceil(std::max(capacity + capacity / 5, capacity + 2));
}

}  // namespace

TouchedKeySet::Slots::Slots(std::size_t count)
    : keys(count * sizeof(std::uint64_t)), lines((count + 64 * kLineSlots - 1) / (64 * kLineSlots)) {}

TouchedKeySet::TouchedKeySet(std::size_t capacity) : capacity_(capacity), slot_count_(slots_for(capacity)) {}

// Promises room for up to `wanted` new keys. As long as a promise holds the set stays within capacity + 1
// keys, so none of the ids it covers would have found the set too large.
std::size_t TouchedKeySet::claim(std::size_t wanted) {
  std::size_t claimed = claimed_.load(std::memory_order_relaxed);
  for (;;) {
    const std::size_t room = std::min(wanted, capacity_ + 1 - claimed);
    if (room == 0 || claimed_.compare_exchange_weak(claimed, claimed + room, std::memory_order_relaxed))
      return room;
  }
}

// True when the key is new.
bool TouchedKeySet::fill_slot(std::uint64_t hash) {
  if (hash == 0) return !holds_zero_.exchange(true, std::memory_order_relaxed);
  std::uint64_t* const slots = words(slots_->keys);
  for (std::size_t at = hash;; ++at) {
    const std::size_t number = at & (slot_count_ - 1);
    std::atomic_ref slot(slots[number]);
    std::uint64_t held = slot.load(std::memory_order_relaxed);
    if (held == 0 && slot.compare_exchange_strong(held, hash, std::memory_order_relaxed)) {
      const std::size_t line = number / kLineSlots;
      std::atomic_ref(slots_->lines[line / 64])
          .fetch_or(std::uint64_t{1} << line % 64, std::memory_order_relaxed);
      return true;
    }
    if (held == hash) return false;
  }
}

// Adds ids whose room is claimed, and gives back the room of those that were there already.
void TouchedKeySet::fill(std::span<const std::int64_t> ids) {
  std::uint64_t* const slots = words(slots_->keys);
  std::size_t known = 0;
  for (std::size_t i = 0; i < ids.size() + kPrefetchAhead; ++i) {
    if (i < ids.size()) __builtin_prefetch(slots + (mix(ids[i]) & (slot_count_ - 1)), 1);
    if (i >= kPrefetchAhead) known += !fill_slot(mix(ids[i - kPrefetchAhead]));
  }
  claimed_.fetch_sub(known, std::memory_order_relaxed);
}

void TouchedKeySet::clear() {
  std::memset(slots_->keys.data(), 0, slots_->keys.size());
  std::fill(slots_->lines.begin(), slots_->lines.end(), 0);
  holds_zero_.store(false, std::memory_order_relaxed);
  claimed_.store(0, std::memory_order_relaxed);
}

std::size_t TouchedKeySet::insert(std::span<const std::int64_t> ids) {
  std::size_t dropped = 0;
  while (!ids.empty()) {
    {
      const auto inside = gate_.enter();
      while (slots_ != nullptr && !ids.empty()) {
        const std::size_t room = claim(std::min(ids.size(), kChunk));
        if (room == 0) break;
        fill(ids.first(room));
        ids = ids.subspan(room);
      }
    }
    if (ids.empty()) break;
    // No slots yet, or no room. Behind the closed gate no promise is open, so the size is exact; then
    // insert some here, so that this thread gets ahead whatever other threads do.
    const auto closed = gate_.close();
    if (slots_ == nullptr) {
      slots_ = spare_ != nullptr ? std::move(spare_) : std::make_unique<Slots>(slot_count_);
    }
    if (const std::size_t size = claimed_.load(std::memory_order_relaxed); size > capacity_) {
      dropped += size;
      clear();
    }
    const std::size_t room = claim(std::min(ids.size(), kChunk));
    fill(ids.first(room));
    ids = ids.subspan(room);
  }
  if (dropped > 0) lose(dropped);
  return dropped;
}

std::vector<std::int64_t> TouchedKeySet::steal() {
  std::unique_ptr<Slots> slots;
  std::size_t size;
  bool holds_zero;
  {
    const auto closed = gate_.close();
    if (slots_ == nullptr) return {};
    slots = std::move(slots_);
    size = claimed_.exchange(0, std::memory_order_relaxed);
    holds_zero = holds_zero_.exchange(false, std::memory_order_relaxed);
  }
  // The slots are ours alone now; inserts continue meanwhile.
  std::vector<std::int64_t> keys;
  keys.reserve(size);
  if (holds_zero) keys.push_back(unmix(0));
  const std::span all(words(slots->keys), slot_count_);
  for (std::size_t word = 0; word < slots->lines.size(); ++word)
    for (std::uint64_t left = std::exchange(slots->lines[word], 0); left != 0; left &= left - 1) {
      const std::size_t first = (word * 64 + static_cast<std::size_t>(std::countr_zero(left))) * kLineSlots;
      for (std::uint64_t& slot : all.subspan(first, std::min(kLineSlots, slot_count_ - first)))
        if (slot != 0) {
          keys.push_back(unmix(slot));
          slot = 0;
        }
    }
  const auto closed = gate_.close();
  if (spare_ == nullptr) spare_ = std::move(slots);
  return keys;
}

std::size_t TouchedKeySet::size() const {
  const auto closed = gate_.close();
  return claimed_.load(std::memory_order_relaxed);
}

}  // namespace monolith
