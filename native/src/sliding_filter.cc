#include "sliding_filter.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace monolith {
namespace {

constexpr std::size_t kMinCapacity = 300;
constexpr std::size_t kMinSplits = 5;
constexpr double kFillRate = 1.2;
constexpr std::size_t kPrefetchAhead = 8;

void check_threshold(std::uint32_t threshold) {
  if (threshold > HashFilter::kMaxCount)
    throw std::invalid_argument(
        "occurrence threshold " + std::to_string(threshold) +
        ": the sliding filter counts to 15, so its thresholds are 1 to 15 (0 asks nothing). "
        "Use the probabilistic filter for rarer admission.");
}

template <class T>
void must_match(const char* what, T saved, T running) {
  if (saved != running)
    throw std::invalid_argument("cannot restore the sliding filter: it was saved with " + std::string(what) +
                                " " + std::to_string(saved) + ", this one has " + std::to_string(running) +
                                ". Restore with the capacity and split_num it was saved with.");
}

}  // namespace

// Holds the one or two stripes that an id's cells lie in.
class SlidingFilter::PlaceLock {
 public:
  PlaceLock(const SlidingFilter& filter, const Place& place) {
    const std::size_t first = place.position / filter.stripe_width_;
    const std::size_t last = (place.position + kProbes - 1) / filter.stripe_width_;
    first_ = std::unique_lock(filter.stripes_[first].mutex);
    if (last != first) last_ = std::unique_lock(filter.stripes_[last].mutex);
  }

 private:
  std::unique_lock<std::mutex> first_, last_;
};

// Holds every stripe: nothing else looks or counts meanwhile.
class SlidingFilter::WholeLock {
 public:
  explicit WholeLock(const SlidingFilter& filter) {
    for (std::size_t s = 0; s < kStripes; ++s) locks_[s] = std::unique_lock(filter.stripes_[s].mutex);
  }

 private:
  std::array<std::unique_lock<std::mutex>, kStripes> locks_;
};

SlidingFilter::SlidingFilter(std::size_t capacity, std::size_t splits, SlotThresholds thresholds)
    : thresholds_(std::move(thresholds)) {
  check_threshold(thresholds_.largest());
  capacity = std::max(capacity, kMinCapacity);
  splits = std::max(splits, kMinSplits);
  if (splits > capacity)
    throw std::invalid_argument("sliding filter: " + std::to_string(splits) + " splits of a capacity of " +
                                std::to_string(capacity) + " leave no room in a split");
  for (std::size_t split = 0; split < splits; ++split)
    blocks_.push_back(std::make_unique<HashFilter>(capacity / (splits - kForwardBlocks + 1), kFillRate));
  stripe_width_ = std::max(kProbes, (cells_per_split() + kStripes - 1) / kStripes);
}

SlidingFilter::SlidingFilter(const SlidingFilter& other, const WholeLock&)
    : thresholds_(other.thresholds_),
      stripe_width_(other.stripe_width_),
      head_(other.head_.load(std::memory_order_relaxed)),
      head_increment_(other.head_increment_),
      failures_(other.failures_.load(std::memory_order_relaxed)) {
  for (const auto& block : other.blocks_) {
    blocks_.push_back(std::make_unique<HashFilter>(block->capacity(), block->fill_rate()));
    blocks_.back()->copy(*block);
  }
}

std::unique_ptr<SlidingFilter> SlidingFilter::copy() const {
  const WholeLock held(*this);
  return std::unique_ptr<SlidingFilter>(new SlidingFilter(*this, held));
}

std::size_t SlidingFilter::backward_blocks() const {
  return std::min<std::size_t>(head_increment_, blocks_.size() - kForwardBlocks);
}

void SlidingFilter::prefetch(const Place& place) const {
  const std::size_t head = head_.load(std::memory_order_relaxed);
  __builtin_prefetch(blocks_[head]->cells().data() + place.position, 1);
  // Without a lock head_increment_ is out of reach; a block still empty has nothing to fetch.
  for (std::size_t i = 0; i < blocks_.size(); ++i)
    if (i != head && blocks_[i]->elements() != 0)
      __builtin_prefetch(blocks_[i]->cells().data() + place.position);
}

SlidingFilter::Found SlidingFilter::find(const Place& place) const {
  const std::size_t head = head_.load(std::memory_order_relaxed), splits = blocks_.size();
  Found found{0, nullptr, HashFilter::kMaxCount};
  for (std::size_t step = 0; step < kForwardBlocks && found.cell == nullptr; ++step) {
    found.block = wrapped(head + step);
    found.cell = blocks_[found.block]->find(place.position, place.signature, kProbes);
  }
  if (found.cell == nullptr) return found;
  found.before = HashFilter::count(*found.cell);
  if (*found.cell != 0) return found;
  for (std::size_t step = 1; step <= backward_blocks(); ++step) {
    const Cell* older =
        blocks_[wrapped(head + splits - step)]->find(place.position, place.signature, kProbes);
    if (older != nullptr && *older != 0) {
      found.before = HashFilter::count(*older);
      break;
    }
  }
  return found;
}

std::uint32_t SlidingFilter::add(const Place& place, std::uint32_t count) {
  bool full = false;
  Found found;
  {
    PlaceLock lock(*this, place);
    found = find(place);
    if (found.cell == nullptr) {
      failures_.fetch_add(1, std::memory_order_relaxed);
      return HashFilter::kMaxCount;
    }
    if (count == 0) return found.before;
    const bool fresh = *found.cell == 0;
    const std::uint32_t sightings = std::min(count, HashFilter::kMaxCount);
    blocks_[found.block]->add_to(*found.cell, place.signature, fresh ? found.before + sightings : sightings);
    full = fresh && blocks_[head_.load(std::memory_order_relaxed)]->full();
  }
  if (full) advance();
  return found.before;
}

void SlidingFilter::advance() {
  WholeLock lock(*this);
  std::size_t head = head_.load(std::memory_order_relaxed);
  if (!blocks_[head]->full()) return;  // another thread was first
  head = wrapped(head + 1);
  head_.store(head, std::memory_order_relaxed);
  ++head_increment_;
  blocks_[wrapped(head + 1)]->clear();
}

std::uint32_t SlidingFilter::add(std::int64_t id, std::uint32_t count) {
  const Place at = place(id);
  prefetch(at);
  return add(at, count);
}

std::uint32_t SlidingFilter::get(std::int64_t id) const {
  const Place at = place(id);
  PlaceLock lock(*this, at);
  return find(at).before;
}

bool SlidingFilter::should_be_filtered(std::int64_t id, std::uint32_t count, std::uint32_t threshold) {
  check_threshold(threshold);
  return threshold > 0 && add(id, count) < threshold;
}

bool SlidingFilter::refuses(std::int64_t id, std::uint32_t count) {
  const std::uint32_t threshold = thresholds_.of(id);
  return threshold > 0 && add(id, count) < threshold;
}

void SlidingFilter::refuse(std::span<const std::int64_t> ids, std::span<const std::uint32_t> counts,
                           std::span<std::uint8_t> mask) {
  if (mask.size() != ids.size() || (!counts.empty() && counts.size() != ids.size()))
    throw std::invalid_argument("refuse: ids, counts and mask must be of one length");
  std::array<Place, kPrefetchAhead> ahead;  // a ring: places computed and fetched, not yet counted
  for (std::size_t i = 0; i < ids.size() + kPrefetchAhead; ++i) {
    if (i >= kPrefetchAhead) {
      const std::size_t now = i - kPrefetchAhead;
      const std::uint32_t threshold = thresholds_.of(ids[now]);
      mask[now] =
          threshold > 0 && add(ahead[now % kPrefetchAhead], counts.empty() ? 1 : counts[now]) < threshold;
    }
    if (i < ids.size()) {
      ahead[i % kPrefetchAhead] = place(ids[i]);
      prefetch(ahead[i % kPrefetchAhead]);
    }
  }
}

std::size_t SlidingFilter::size() const {
  std::size_t elements = 0;
  for (const auto& block : blocks_) elements += block->elements();
  return elements;
}

HashFilter& SlidingFilter::block(std::size_t split) const {
  if (split >= blocks_.size())
    throw std::invalid_argument("sliding filter: no split " + std::to_string(split) + ", there are " +
                                std::to_string(blocks_.size()));
  return *blocks_[split];
}

void SlidingFilter::check_range(std::size_t split, std::size_t offset, std::size_t count) const {
  const std::size_t cells = block(split).cells().size();
  if (offset > cells || count > cells - offset)
    throw std::invalid_argument("sliding filter: cells " + std::to_string(offset) + " to " +
                                std::to_string(offset + count) + " of split " + std::to_string(split) +
                                ", which has " + std::to_string(cells));
}

SlidingFilterMeta SlidingFilter::meta() const {
  WholeLock lock(*this);
  return {.split_num = static_cast<std::uint32_t>(blocks_.size()),
          .max_forward_step = kForwardBlocks,
          .max_backward_step = static_cast<std::uint32_t>(blocks_.size() - kForwardBlocks),
          .max_step = kProbes,
          .head = static_cast<std::uint32_t>(head_.load(std::memory_order_relaxed)),
          .head_increment = head_increment_,
          .failure_count = failures()};
}

FilterSplitMeta SlidingFilter::split_meta(std::size_t split) const {
  const HashFilter& from = block(split);
  WholeLock lock(*this);
  return {.failure_count = from.failures(),
          .total_size = from.total_size(),
          .num_elements = from.elements(),
          .fill_rate = from.fill_rate()};
}

void SlidingFilter::read_cells(std::size_t split, std::size_t offset, std::span<Cell> out) const {
  check_range(split, offset, out.size());
  const auto cells = block(split).cells().subspan(offset, out.size());
  WholeLock lock(*this);
  std::copy(cells.begin(), cells.end(), out.begin());
}

void SlidingFilter::restore(const SlidingFilterMeta& meta) {
  const SlidingFilterMeta running = this->meta();
  must_match("split_num", meta.split_num, running.split_num);
  must_match("max_forward_step", meta.max_forward_step, running.max_forward_step);
  must_match("max_backward_step", meta.max_backward_step, running.max_backward_step);
  must_match("max_step", meta.max_step, running.max_step);
  if (meta.head >= blocks_.size())
    throw std::invalid_argument("cannot restore the sliding filter: its head is split " +
                                std::to_string(meta.head) + " of " + std::to_string(blocks_.size()));
  WholeLock lock(*this);
  for (const auto& block : blocks_) block->clear();
  head_.store(meta.head, std::memory_order_relaxed);
  head_increment_ = meta.head_increment;
  failures_.store(meta.failure_count, std::memory_order_relaxed);
}

void SlidingFilter::restore_split(std::size_t split, const FilterSplitMeta& meta) {
  HashFilter& to = block(split);
  must_match("total_size", meta.total_size, static_cast<std::uint64_t>(to.total_size()));
  must_match("fill_rate", meta.fill_rate, to.fill_rate());
  WholeLock lock(*this);
  to.set_failures(meta.failure_count);
}

void SlidingFilter::write_cells(std::size_t split, std::size_t offset, std::span<const Cell> cells) {
  check_range(split, offset, cells.size());
  WholeLock lock(*this);
  block(split).write(offset, cells);
}

}  // namespace monolith
