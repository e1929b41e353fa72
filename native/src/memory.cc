#include "memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace monolith {

void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it accepts: larger blocks are mapped as before
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
#endif
}

namespace {
constexpr std::size_t kHugePage = 2 << 20;
constexpr std::size_t kPage = 4 << 10;

std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}
}  // namespace

Region::Region(std::size_t bytes) : size_(bytes) {
  const bool huge = bytes >= kHugePage;
  mapped_ = round_up(bytes, kPage) + (huge ? kHugePage : 0);
  mapping_ =
      mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = static_cast<std::byte*>(mapping_);
  if (huge) {
    data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(mapping_), kHugePage));
    madvise(data_, round_up(bytes, kPage), MADV_HUGEPAGE);  // a wish: without it the table is only slower
  }
}

Region::~Region() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

Region::Region(Region&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(other.mapped_),
      data_(other.data_),
      size_(other.size_) {}

RowArenas::RowArenas(std::size_t row_bytes, Budget& budget) : row_bytes_(row_bytes), budget_(budget) {
  for (auto& origin : origins_) origin.store(nullptr, std::memory_order_relaxed);
}

RowArenas::Range RowArenas::take(std::uint32_t wanted) {
  std::lock_guard lock(mutex_);
  if (next_ + kChunkRows > UINT32_MAX) return {};
  const auto first = static_cast<std::uint32_t>(next_);
  const std::uint32_t left =
      std::bit_floor(first) * 2 - first;  // in this arena, which ends at a power of two
  wanted = std::min(wanted, left == 0 ? UINT32_MAX - first : left);
  if (!budget_.take(wanted * row_bytes_)) {
    wanted = kChunkRows;
    if (!budget_.take(wanted * row_bytes_)) return {};
  }
  // The first row of a new arena, which holds `first` rows.
  if (std::has_single_bit(first) && origins_[std::countl_zero(first)].load() == nullptr) {
    try {
      regions_.emplace_back(std::size_t{first} * row_bytes_);
    } catch (const std::bad_alloc&) {
      budget_.give(wanted * row_bytes_);
      return {};
    }
    // An origin before its region is never dereferenced: only numbers from `first` on use it.
    const auto origin =
        reinterpret_cast<std::uintptr_t>(regions_.back().data()) - std::size_t{first} * row_bytes_;
    origins_[std::countl_zero(first)].store(reinterpret_cast<std::byte*>(origin), std::memory_order_relaxed);
  }
  next_ += wanted;
  taken_.fetch_add(wanted * row_bytes_, std::memory_order_relaxed);
  return {first, first + wanted};
}

std::uint32_t RowArenas::end() const {
  std::lock_guard lock(mutex_);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(next_, UINT32_MAX));
}

void RowArenas::release_from(std::uint32_t first) {
  std::lock_guard lock(mutex_);
  if (first >= next_) return;
  for (std::size_t arena = 0; arena < regions_.size(); ++arena) {
    const std::uint64_t begin = std::uint64_t{kChunkRows} << arena;  // its first row
    if (2 * begin <= first) continue;
    const std::size_t kept = first > begin ? round_up((first - begin) * row_bytes_, kPage) : 0;
    const std::size_t used = std::min(2 * begin, next_) > begin
                                 ? round_up((std::min(2 * begin, next_) - begin) * row_bytes_, kPage)
                                 : 0;
    if (used > kept) madvise(regions_[arena].data() + kept, used - kept, MADV_DONTNEED);
  }
  const std::size_t bytes = (next_ - first) * row_bytes_;
  next_ = first;
  taken_.fetch_sub(bytes, std::memory_order_relaxed);
  budget_.give(bytes);
}

IndexHeap::~IndexHeap() {
  budget_.give(taken_.load());
}

void* IndexHeap::allocate(std::size_t bytes) {
  if (bytes < kUnit || taken_.load(std::memory_order_relaxed) < kLarge) {
    if (!budget_.take(bytes)) return nullptr;
    void* array = std::aligned_alloc(64, round_up(bytes, 64));
    if (array == nullptr) {
      budget_.give(bytes);
      return nullptr;
    }
    taken_.fetch_add(bytes, std::memory_order_relaxed);
    return std::memset(array, 0, bytes);
  }
  const std::size_t wanted = units(bytes);
  std::byte* found = nullptr;
  {
    std::lock_guard lock(mutex_);
    auto best = holes_.end();
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole)
      if (hole->second >= wanted && (best == holes_.end() || hole->second < best->second)) best = hole;
    if (best == holes_.end()) {
      // Regions grow with what is in use, from 2 to 8 MiB, so that slack stays a small share.
      std::size_t size = std::clamp(round_up(taken_.load() / 4, kHugePage), kHugePage, 4 * kHugePage);
      size = std::max(size, wanted);
      if (!gives_back_ && !budget_.take(size)) {
        size = wanted;
        if (!budget_.take(size)) return nullptr;
      }
      try {
        Region region(size);
        best = holes_.emplace(region.data(), size).first;
        regions_.emplace(region.data(), std::move(region));
      } catch (const std::bad_alloc&) {
        budget_.give(size);
        return nullptr;
      }
      if (!gives_back_) taken_.fetch_add(size, std::memory_order_relaxed);
    }
    if (gives_back_) {
      if (!budget_.take(wanted)) return nullptr;
      taken_.fetch_add(wanted, std::memory_order_relaxed);
    }
    found = best->first;
    const std::size_t left = best->second - wanted;
    holes_.erase(best);
    if (left > 0) holes_.emplace(found + wanted, left);
  }
  return std::memset(found, 0, bytes);
}

void IndexHeap::free(void* array, std::size_t bytes) {
  auto* begin = static_cast<std::byte*>(array);
  std::size_t size = units(bytes);
  std::lock_guard lock(mutex_);
  const auto above = regions_.upper_bound(begin);
  const bool carved =
      above != regions_.begin() && begin < std::prev(above)->first + std::prev(above)->second.size();
  if (!carved) {
    std::free(array);
    taken_.fetch_sub(bytes, std::memory_order_relaxed);
    budget_.give(bytes);
    return;
  }
  if (gives_back_) {
    madvise(begin, size, MADV_DONTNEED);
    taken_.fetch_sub(size, std::memory_order_relaxed);
    budget_.give(size);
  }
  auto after = holes_.lower_bound(begin);
  if (after != holes_.end() && begin + size == after->first) {
    size += after->second;
    after = holes_.erase(after);
  }
  if (after != holes_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == begin) {
      before->second += size;
      return;
    }
  }
  holes_.emplace_hint(after, begin, size);
}

}  // namespace monolith
