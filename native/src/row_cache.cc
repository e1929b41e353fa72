#include "row_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "frozen_format.h"
#include "hash.h"

namespace monolith {
namespace {

constexpr std::size_t kMostAtOnce = 64 << 10;  // one read of rows that are near each other

}  // namespace

RowCache::RowCache(int descriptor, Layout layout, std::size_t bytes, std::shared_ptr<BlockReader> reader)
    : layout_(std::move(layout)),
      reader_(std::move(reader)),
      sets_(std::max<std::size_t>(bytes / bytes_of(layout_.row_bytes) / kWays, 1)) {
  if (reader_ == nullptr) throw std::invalid_argument("row cache: needs a reader");
  // Another descriptor of the same file, which may be open without O_DIRECT.
  const std::string same = "/proc/self/fd/" + std::to_string(descriptor);
  descriptor_ = ::open(same.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (descriptor_ < 0 && errno == EINVAL) descriptor_ = ::open(same.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "open " + layout_.path);
  rows_.assign(sets_ * kWays, 0);
  uses_.assign(sets_ * kWays, 0);
  hands_.assign(sets_, 0);
  bytes_.reset(new std::byte[sets_ * kWays * layout_.row_bytes]);
}

RowCache::~RowCache() {
  ::close(descriptor_);
}

RowCache::Stats RowCache::stats() const {
  Stats now;
  now.found = found_.load(std::memory_order_relaxed);
  now.in_memory = in_memory_.load(std::memory_order_relaxed);
  now.reads = reads_.load(std::memory_order_relaxed);
  now.bytes_read = bytes_read_.load(std::memory_order_relaxed);
  now.bytes = sets_ * kWays * bytes_of(layout_.row_bytes);
  return now;
}

void RowCache::count(std::uint64_t found, std::uint64_t in_memory) {
  found_.fetch_add(found, std::memory_order_relaxed);
  in_memory_.fetch_add(in_memory, std::memory_order_relaxed);
}

std::size_t RowCache::set_of(std::uint32_t row) const {
  return static_cast<std::size_t>(mix(row) % sets_);
}

bool RowCache::recall(std::uint32_t row, std::byte* into) {
  const std::size_t set = set_of(row);
  std::lock_guard lock(stripes_[set % kStripes]);
  for (std::size_t at = set * kWays; at < (set + 1) * kWays; ++at) {
    if (rows_[at] != row + 1) continue;
    uses_[at] = static_cast<std::uint8_t>(std::min(uses_[at] + 2, 3));
    std::memcpy(into, bytes_.get() + at * layout_.row_bytes, layout_.row_bytes);
    return true;
  }
  return false;
}

void RowCache::keep(std::uint32_t row, const std::byte* bytes) {
  const std::size_t set = set_of(row), first = set * kWays;
  std::lock_guard lock(stripes_[set % kStripes]);
  for (std::size_t at = first; at < first + kWays; ++at)
    if (rows_[at] == row + 1) return;  // another thread read it, too
  std::uint8_t& hand = hands_[set];
  while (uses_[first + hand] > 0) {
    --uses_[first + hand];
    hand = static_cast<std::uint8_t>((hand + 1) % kWays);
  }
  const std::size_t at = first + hand;
  hand = static_cast<std::uint8_t>((hand + 1) % kWays);
  rows_[at] = row + 1;
  std::memcpy(bytes_.get() + at * layout_.row_bytes, bytes, layout_.row_bytes);
}

void RowCache::fetch(std::vector<Miss>& misses) {
  if (misses.empty()) return;
  std::sort(misses.begin(), misses.end(), [](const Miss& a, const Miss& b) {
    return a.cache != b.cache ? std::less<>()(a.cache, b.cache) : a.row < b.row;
  });
  std::vector<BlockReader::Read> reads;
  std::vector<std::size_t> firsts;  // of each read, in `misses`; and the end
  for (std::size_t i = 0; i < misses.size(); ++i) {
    const RowCache& cache = *misses[i].cache;
    const std::uint64_t at = cache.place(misses[i].row), from = at / kPage * kPage;
    const std::uint64_t to = (at + cache.layout_.row_bytes + kPage - 1) / kPage * kPage;
    if (!reads.empty() && reads.back().descriptor == cache.descriptor_ &&
        from <= reads.back().offset + reads.back().bytes && to - reads.back().offset <= kMostAtOnce) {
      reads.back().bytes = std::max<std::size_t>(reads.back().bytes, to - reads.back().offset);
      continue;
    }
    reads.push_back({cache.descriptor_, from, static_cast<std::size_t>(to - from), nullptr});
    firsts.push_back(i);
  }
  firsts.push_back(misses.size());
  misses[0].cache->reader_->run(reads, [&](std::size_t number, const std::byte* bytes) {
    const BlockReader::Read& read = reads[number];
    RowCache& cache = *misses[firsts[number]].cache;
    if (read.error != 0)
      throw FrozenDamage(cache.layout_.path, read.offset,
                         read.error < 0 ? "the file ends too early, it was cut since it was opened"
                                        : std::string("it cannot be read: ") + std::strerror(read.error));
    cache.reads_.fetch_add(1, std::memory_order_relaxed);
    cache.bytes_read_.fetch_add(read.bytes, std::memory_order_relaxed);
    for (std::size_t i = firsts[number]; i < firsts[number + 1]; ++i) {
      const std::byte* const row = bytes + (cache.place(misses[i].row) - read.offset);
      std::memcpy(misses[i].into, row, cache.layout_.row_bytes);
      cache.keep(misses[i].row, row);
    }
  });
}

}  // namespace monolith
