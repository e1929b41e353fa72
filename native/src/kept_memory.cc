#include "kept_memory.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <new>

namespace monolith {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kUnit = 2 << 20;  // a huge page

}  // namespace

KeptMemory::Block::~Block() {
  if (region_ != nullptr)
    owner_->give_back(std::move(region_));
  else
    std::free(data_);
}

KeptMemory::Block& KeptMemory::Block::operator=(Block&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(region_, other.region_);
  std::swap(owner_, other.owner_);
  return *this;
}

KeptMemory::Block KeptMemory::take(std::size_t bytes) {
  Block block;
  if (bytes < kLarge) {
    const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    block.data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
    if (block.data_ == nullptr) throw std::bad_alloc();
    return block;
  }
  std::vector<Idle> unwanted;  // unmapped after the mutex is released
  {
    std::lock_guard lock(mutex_);
    ++turn_;
    auto best = idle_.end();
    for (auto idle = idle_.begin(); idle != idle_.end(); ++idle)
      if (idle->region->size() >= bytes && idle->region->size() / 2 <= bytes &&
          (best == idle_.end() || idle->region->size() < best->region->size()))
        best = idle;
    if (best != idle_.end()) {
      block.region_ = std::move(best->region);
      idle_.erase(best);
    }
    const auto old = std::partition(idle_.begin(), idle_.end(),
                                    [&](const Idle& idle) { return turn_ - idle.since <= kTurns; });
    std::move(old, idle_.end(), std::back_inserter(unwanted));
    idle_.erase(old, idle_.end());
  }
  // Batches differ a little in size: room for the next one, in whole huge pages.
  if (block.region_ == nullptr)
    block.region_ = std::make_unique<Region>((bytes + bytes / 8 + kUnit - 1) / kUnit * kUnit);
  block.data_ = block.region_->data();
  block.owner_ = shared_from_this();
  return block;
}

void KeptMemory::give_back(std::unique_ptr<Region> region) {
  std::lock_guard lock(mutex_);
  idle_.push_back({std::move(region), turn_});
}

std::size_t KeptMemory::bytes() const {
  std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const Idle& idle : idle_) sum += idle.region->size();
  return sum;
}

}  // namespace monolith
