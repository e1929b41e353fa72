#include "row_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "frozen_format.h"
#include "hash.h"

namespace monolith {
namespace {

constexpr std::size_t kMostAtOnce = 128 << 10;  // one read of rows that are near each other

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// Memory for reads, which a thread keeps for its next call.
std::byte* read_memory(std::size_t bytes) {
  thread_local std::unique_ptr<std::byte, Free> held;
  thread_local std::size_t size = 0;
  if (bytes > size) {
    held.reset(static_cast<std::byte*>(std::aligned_alloc(RowCache::kPage, bytes)));
    size = held != nullptr ? bytes : 0;
    if (held == nullptr) throw std::bad_alloc();
  }
  return held.get();
}

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
  struct Part {
    std::size_t first, end;  // in `misses`
    std::size_t at;          // in the memory
  };
  std::vector<BlockReader::Read> reads;
  std::vector<Part> parts;
  std::size_t total = 0;
  for (std::size_t i = 0; i < misses.size(); ++i) {
    const RowCache& cache = *misses[i].cache;
    const std::uint64_t from = cache.place(misses[i].row) / kPage * kPage;
    const std::uint64_t to =
        (cache.place(misses[i].row) + cache.layout_.row_bytes + kPage - 1) / kPage * kPage;
    if (!reads.empty() && reads.back().descriptor == cache.descriptor_ &&
        from <= reads.back().offset + reads.back().bytes && to - reads.back().offset <= kMostAtOnce) {
      reads.back().bytes = std::max<std::size_t>(reads.back().bytes, to - reads.back().offset);
      parts.back().end = i + 1;
    } else {
      if (!reads.empty()) total += reads.back().bytes;
      reads.push_back({cache.descriptor_, from, static_cast<std::size_t>(to - from), nullptr});
      parts.push_back({i, i + 1, total});
    }
  }
  total += reads.back().bytes;
  std::byte* const memory = read_memory(total);
  for (std::size_t r = 0; r < reads.size(); ++r) reads[r].into = memory + parts[r].at;
  misses[0].cache->reader_->run(reads);
  for (std::size_t r = 0; r < reads.size(); ++r) {
    const BlockReader::Read& read = reads[r];
    RowCache& cache = *misses[parts[r].first].cache;
    if (read.error != 0)
      throw FrozenDamage(cache.layout_.path, read.offset,
                         read.error < 0 ? "the file ends too early, it was cut since it was opened"
                                        : std::string("it cannot be read: ") + std::strerror(read.error));
    cache.reads_.fetch_add(1, std::memory_order_relaxed);
    cache.bytes_read_.fetch_add(read.bytes, std::memory_order_relaxed);
    for (std::size_t i = parts[r].first; i < parts[r].end; ++i) {
      const std::byte* const row = read.into + (cache.place(misses[i].row) - read.offset);
      std::memcpy(misses[i].into, row, cache.layout_.row_bytes);
      cache.keep(misses[i].row, row);
    }
  }
}

}  // namespace monolith
