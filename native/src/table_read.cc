// Reading: batches of lookups that take no lock.
#include <algorithm>
#include <cstring>

#include "table_body.h"

namespace monolith {
namespace {

constexpr std::size_t kBlock = 256;  // ids read together
constexpr std::size_t kAhead = 16;  // index lines are fetched this long before rows, and rows before the copy
constexpr std::size_t kLine = 64;
constexpr std::size_t kGrain = 4096;  // ids per task

// Copies a row that a writer may be changing. What comes out of such a race is thrown away, because the
// version will not match; thread sanitizers are told so here and nowhere else.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"), noinline)) void copy_racing(std::byte* to, const std::byte* from,
                                                                  std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    to[i] = from[i];
    asm volatile("" ::: "memory");  // or this loop becomes a memcpy that the sanitizer sees
  }
}
#else
inline
    __attribute__((always_inline)) void copy_racing(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
#endif

}  // namespace

// One block while nobody writes, in passes that each keep many cache misses in flight: where the ids belong,
// their index lines, what those say, and the rows. The passes are apart because a processor can look only
// some hundred instructions ahead, and a short loop fits that window many times. kBytes is the usual widths
// spelled out, so that a row is copied in a few instructions; 0 is any.
template <std::size_t kBytes>
void Table::read_block_of(Body& body, std::span<const std::int64_t> ids, std::byte* out,
                          std::size_t any_bytes, std::uint8_t* found, std::uint32_t* times) const {
  const std::size_t bytes = kBytes != 0 ? kBytes : any_bytes;
  const std::size_t count = ids.size();
  std::uint64_t hashes[kBlock];
  const Slot* buckets[kBlock];
  const std::byte* rows[kBlock];
  std::uint8_t late[kBlock];
  std::size_t late_count = 0;

  const Directory& directory = *body.directory.load(std::memory_order_acquire);
  const Directory::Cell* const cells = directory.cells.get();
  const int shift = 63 - directory.depth;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t hash = mix(ids[i]);
    hashes[i] = hash;
    buckets[i] = cells[hash >> 1 >> shift].index.load(kFollowed).bucket_of(hash);
  }
  // Loads rather than prefetches: a burst of prefetches is partly dropped, a burst of loads is not.
  std::uint64_t touched = 0;
  for (std::size_t i = 0; i < count; ++i) touched |= peek(buckets[i]->hash);
  asm volatile("" : : "r"(touched));

  const RowArenas::Finder row_at(body.rows);
  const std::byte* const zeros = zeros_.data();
  const auto note = [&](std::size_t i, std::uint32_t row, std::uint32_t time) {
    rows[i] = row != 0 ? row_at(row) : zeros;
    found[i] = row != 0;
    if (times != nullptr) times[i] = time;
  };
  for (std::size_t i = 0; i < count; ++i) {
    const Index::Seen seen = Index::look(buckets[i], hashes[i]);
    note(i, seen.row, seen.time);
    if (seen.row == 0 && seen.full) [[unlikely]] {
      // Not in its home line, but that line is full. The next one is fetched while the others go on.
      __builtin_prefetch(buckets[i] + kBucketSlots);
      late[late_count++] = static_cast<std::uint8_t>(i);
    }
  }
  for (std::size_t l = 0; l < late_count; ++l) {
    const std::uint64_t hash = hashes[late[l]];
    const Slot* slot = directory.at(hash).index.load(kFollowed).find(hash);
    note(late[l], slot != nullptr ? peek(slot->row) : 0, slot != nullptr ? peek(slot->time) : 0);
  }
  const auto fetch = [&](std::size_t i) {
    for (std::size_t line = 0; line < bytes; line += kLine) __builtin_prefetch(rows[i] + line);
  };
  if (bytes == 0) return;
  for (std::size_t i = 0; i < std::min(count, kAhead); ++i) fetch(i);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) fetch(i + kAhead);
    copy_racing(out + i * bytes, rows[i], bytes);
  }
}

// One block, in spite of writers: every id on its own, with its partition's version before and after.
void Table::recheck_block(Body& body, std::span<const std::int64_t> ids, std::byte* out, std::size_t bytes,
                          std::uint8_t* found, std::uint32_t* times) const {
  const std::size_t count = ids.size();
  for (std::size_t i = 0; i < std::min(count, kAhead); ++i) body.prefetch(mix(ids[i]));
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) body.prefetch(mix(ids[i + kAhead]));
    std::uint32_t time = 0;
    found[i] = read_one(body, mix(ids[i]), out + i * bytes, bytes, &time);
    if (times != nullptr) times[i] = time;
  }
}

void Table::read_block(Body& body, std::span<const std::int64_t> ids, std::byte* out, std::size_t bytes,
                       std::uint8_t* found, std::uint32_t* times) const {
  // Whoever reads alone need not look at versions. Calls that write are counted when they begin, before they
  // change anything, so an unchanged count says that this block met none.
  const std::uint64_t begun = writes_begun_.load();
  if (writes_ended_.load() == begun) {
    switch (bytes) {
      case 16:
        read_block_of<16>(body, ids, out, bytes, found, times);
        break;
      case 32:
        read_block_of<32>(body, ids, out, bytes, found, times);
        break;
      case 64:
        read_block_of<64>(body, ids, out, bytes, found, times);
        break;
      case 68:
        read_block_of<68>(body, ids, out, bytes, found, times);  // a bias and a vector of 16
        break;
      case 128:
        read_block_of<128>(body, ids, out, bytes, found, times);
        break;
      case 256:
        read_block_of<256>(body, ids, out, bytes, found, times);
        break;
      default:
        read_block_of<0>(body, ids, out, bytes, found, times);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (writes_begun_.load(std::memory_order_relaxed) == begun) return;
  }
  recheck_block(body, ids, out, bytes, found, times);
}

// One id among writers: a few tries by version, then the lock.
bool Table::read_one(Body& body, std::uint64_t hash, std::byte* out, std::size_t bytes,
                     std::uint32_t* time) const {
  for (int tries = 0; tries < 8; ++tries) {
    const Partition& part = *body.route(hash);
    const std::uint64_t version = part.version.load(std::memory_order_acquire);
    if ((version & 1) != 0 || !part.owns(hash)) continue;
    const Slot* slot = part.index.load(kFollowed).find(hash);
    const std::uint32_t row = slot != nullptr ? peek(slot->row) : 0;
    if (row != 0) {
      *time = peek(slot->time);
      copy_racing(out, body.rows.row(row), bytes);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (part.version.load(std::memory_order_relaxed) != version) continue;
    if (row == 0) std::memset(out, 0, bytes);
    return row != 0;
  }
  for (;;) {
    Partition& part = *body.route(hash);
    std::lock_guard lock(part.mutex);
    if (!part.owns(hash)) continue;
    const Slot* slot = part.index.load(kFollowed).find(hash);
    if (slot == nullptr) {
      std::memset(out, 0, bytes);
      return false;
    }
    *time = slot->time;
    std::memcpy(out, body.rows.row(slot->row), bytes);
    return true;
  }
}

std::size_t Table::lookup(std::span<const std::int64_t> ids, float* out) const {
  Epochs::Visit visit(epochs_);
  Body& body = *body_.load();
  const std::size_t dim = entry_.dim();
  const std::size_t bytes = entry_.serving() ? entry_.row_bytes() : dim * sizeof(float);
  std::atomic<std::size_t> hits{0};
  spread(ids.size(), kGrain, [&](std::size_t begin, std::size_t end) {
    std::uint8_t found[kBlock];
    std::vector<std::byte> compressed(entry_.serving() ? kBlock * bytes : 0);
    std::size_t hit = 0;
    for (std::size_t at = begin; at < end; at += kBlock) {
      const std::size_t count = std::min(kBlock, end - at);
      float* values = out + at * dim;
      auto* to = entry_.serving() ? compressed.data() : reinterpret_cast<std::byte*>(values);
      read_block(body, ids.subspan(at, count), to, bytes, found, nullptr);
      for (std::size_t i = 0; i < count; ++i) {
        hit += found[i];
        if (entry_.serving()) {
          if (found[i])
            entry_.read(compressed.data() + i * bytes, values + i * dim);
          else
            std::fill_n(values + i * dim, dim, 0.0f);
        } else if (entry_.has_view() && found[i]) {
          entry_.view(values + i * dim);
        }
      }
    }
    hits.fetch_add(hit, std::memory_order_relaxed);
  });
  return hits;
}

void Table::lookup_rows(std::span<const std::int64_t> ids, std::uint8_t* found, std::int64_t* times,
                        float* values, float* state) const {
  Epochs::Visit visit(epochs_);
  Body& body = *body_.load();
  const std::size_t dim = entry_.dim();
  const std::size_t state_dim = entry_.state_dim();
  const std::size_t bytes = values != nullptr || state != nullptr ? entry_.row_bytes() : 0;
  spread(ids.size(), kGrain, [&](std::size_t begin, std::size_t end) {
    std::uint8_t there[kBlock];
    std::uint32_t seen[kBlock];
    std::vector<std::byte> rows(std::max<std::size_t>(kBlock * bytes, 1));  // somewhere to point to, at least
    for (std::size_t at = begin; at < end; at += kBlock) {
      const std::size_t count = std::min(kBlock, end - at);
      read_block(body, ids.subspan(at, count), rows.data(), bytes, there, seen);
      for (std::size_t i = 0; i < count; ++i) {
        const std::byte* row = rows.data() + i * bytes;
        if (found != nullptr) found[at + i] = there[i];
        if (times != nullptr) times[at + i] = seen[i];
        if (values != nullptr) {
          if (there[i])
            entry_.read(row, values + (at + i) * dim);
          else
            std::fill_n(values + (at + i) * dim, dim, 0.0f);
        }
        if (state != nullptr)
          std::memcpy(state + (at + i) * state_dim, row + dim * sizeof(float), state_dim * sizeof(float));
      }
    }
  });
}

}  // namespace monolith
