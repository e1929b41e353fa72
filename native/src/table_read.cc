// Reading: batches of lookups that take no lock.
#include <algorithm>
#include <cstring>

#include "prefetch.h"
#include "table_body.h"

namespace monolith {
namespace {

constexpr std::size_t kBlock = 256;  // ids read together
constexpr std::size_t kAhead = 6;    // rows are fetched this long before the copy; more at once make it wait

// Ids per task, whole blocks: some tasks for every thread, and none that is not worth waking one for.
std::size_t grain_of(std::size_t count, const Workers* workers) {
  if (count < 8 * kBlock) return 8 * kBlock;
  const std::size_t tasks = 4 * (workers != nullptr ? workers->at_hand() : 1);
  return std::clamp(count / tasks / kBlock, std::size_t{4}, std::size_t{16}) * kBlock;
}

using Sixteen __attribute__((vector_size(16), aligned(1), may_alias)) = std::uint8_t;

// Copies a row that a writer may be changing. The copy of such a race is thrown away, because the version
// will not match. The attribute is the only word about it to the thread sanitizer, which otherwise tests the
// code that ships: loads are volatile because a memcpy would be the sanitizer's own, which reports the race.
__attribute__((no_sanitize("thread"))) inline void copy_racing(std::byte* to, const std::byte* from,
                                                               std::size_t bytes) {
  std::size_t i = 0;
  for (; i + 16 <= bytes; i += 16)
    *reinterpret_cast<Sixteen*>(to + i) = *reinterpret_cast<const volatile Sixteen*>(from + i);
  for (; i < bytes; ++i) to[i] = *const_cast<const volatile std::byte*>(from + i);
}

}  // namespace

// Where the ids of a block belong, found out while the block before it is copied.
struct Table::Aim {
  std::uint64_t begun;  // calls that had begun to write before
  const Directory* directory;
  std::uint64_t hashes[kBlock];
  const Slot* buckets[kBlock];

  void start(const Table& table, const Body& body) {
    begun = table.writes_begun_.load();
    directory = body.directory.load(std::memory_order_acquire);
  }
  void take(std::size_t i, std::int64_t id) {
    const std::uint64_t hash = mix(id);
    hashes[i] = hash;
    buckets[i] = directory->index(hash).bucket_of(hash);
  }
};

// One block while no call writes: the index lines, then the rows. Two streams of cache misses are
// kept in flight meanwhile, those rows and the index lines of the next block, which will be there when it is
// looked through. Finding out where the next ids belong also keeps the prefetches apart, of which a burst is
// partly dropped. kBytes is the usual widths spelled out, so that a row is copied in a few instructions; 0 is
// any.
template <std::size_t kBytes>
void Table::read_block_of(Body& body, const Aim& aim, std::size_t count, Aim& next_aim,
                          std::span<const std::int64_t> next, std::byte* out, std::size_t any_bytes,
                          std::uint8_t* found, std::uint32_t* times) const {
  const std::size_t bytes = kBytes != 0 ? kBytes : any_bytes;
  const std::byte* rows[kBlock];
  std::uint8_t late[kBlock];
  std::size_t late_count = 0;

  const RowArenas::Finder row_at(body.rows);
  const std::byte* const zeros = zeros_.data();
  const auto note = [&](std::size_t i, std::uint32_t row, std::uint32_t time) {
    rows[i] = row != 0 ? row_at(row) : zeros;
    found[i] = row != 0;
    if (times != nullptr) times[i] = time;
  };
  for (std::size_t i = 0; i < count; ++i) {
    const Index::Seen seen = Index::look(aim.buckets[i], aim.hashes[i]);
    note(i, seen.row, seen.time);
    if (seen.row == 0 && seen.full) [[unlikely]] {
      // Not in its home line, but that line is full. The next one is fetched while the loop continues.
      __builtin_prefetch(aim.buckets[i] + kBucketSlots);
      late[late_count++] = static_cast<std::uint8_t>(i);
    }
  }
  for (std::size_t l = 0; l < late_count; ++l) {
    const std::uint64_t hash = aim.hashes[late[l]];
    const Slot* slot = aim.directory->index(hash).find(hash);
    note(late[l], slot != nullptr ? peek(slot->row) : 0, slot != nullptr ? peek(slot->time) : 0);
  }
  const auto fetch = [&](std::size_t i) {
    for (std::size_t line = 0; line < bytes; line += kLine) __builtin_prefetch(rows[i] + line);
  };
  next_aim.start(*this, body);
  for (std::size_t i = 0; i < std::min(count, kAhead); ++i) fetch(i);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) fetch(i + kAhead);
    if (i < next.size()) {
      next_aim.take(i, next[i]);
      __builtin_prefetch(next_aim.buckets[i]);
    }
    copy_racing(out + i * bytes, rows[i], bytes);
  }
}

// One block, in spite of writers: every id on its own, with its partition's version before and after.
void Table::recheck_block(Body& body, std::span<const std::int64_t> ids, std::byte* out, std::size_t bytes,
                          std::uint8_t* found, std::uint32_t* times) const {
  const std::size_t count = ids.size();
  for (std::size_t i = 0; i < std::min(count, kAhead); ++i) body.prefetch<0>(mix(ids[i]));
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) body.prefetch<0>(mix(ids[i + kAhead]));
    std::uint32_t time = 0;
    found[i] = read_one(body, mix(ids[i]), out + i * bytes, bytes, &time);
    if (times != nullptr) times[i] = time;
  }
}

template <class Done>
void Table::read_blocks(Body& body, std::span<const std::int64_t> ids, std::byte* out, std::size_t bytes,
                        std::size_t step, std::uint8_t* found, std::uint32_t* times, Done&& done) const {
  Aim aims[2];
  Aim* aim = &aims[0];
  Aim* next_aim = &aims[1];
  aim->start(*this, body);
  const std::size_t first = std::min(kBlock, ids.size());
  for (std::size_t i = 0; i < first; ++i) aim->take(i, ids[i]);
  // Nothing was copied before, so nothing was fetched. Loads are not dropped, however many there are.
  std::uint64_t touched = 0;
  for (std::size_t i = 0; i < first; ++i) touched |= peek(aim->buckets[i]->hash);
  asm volatile("" : : "r"(touched));
  for (std::size_t at = 0; at < ids.size(); at += kBlock, out += step) {
    const std::size_t count = std::min(kBlock, ids.size() - at);
    const auto next = ids.subspan(at + count, std::min(kBlock, ids.size() - at - count));
    // A reader that meets no writer need not check versions. Calls that write are counted when they begin,
    // before they change anything, so an unchanged count says that this block met none.
    bool alone = writes_ended_.load() == aim->begun;
    if (alone) {
      read_block(body, *aim, count, *next_aim, next, out, bytes, found, times);
      std::atomic_thread_fence(std::memory_order_acquire);
      alone = writes_begun_.load(std::memory_order_relaxed) == aim->begun;
    } else {
      next_aim->start(*this, body);
      for (std::size_t i = 0; i < next.size(); ++i) next_aim->take(i, next[i]);
    }
    if (!alone) recheck_block(body, ids.subspan(at, count), out, bytes, found, times);
    done(at, count);
    std::swap(aim, next_aim);
  }
}

void Table::read_block(Body& body, const Aim& aim, std::size_t count, Aim& next_aim,
                       std::span<const std::int64_t> next, std::byte* out, std::size_t bytes,
                       std::uint8_t* found, std::uint32_t* times) const {
  switch (bytes) {
    case 16:
      return read_block_of<16>(body, aim, count, next_aim, next, out, bytes, found, times);
    case 32:
      return read_block_of<32>(body, aim, count, next_aim, next, out, bytes, found, times);
    case 64:
      return read_block_of<64>(body, aim, count, next_aim, next, out, bytes, found, times);
    case 68:  // a bias and a vector of 16
      return read_block_of<68>(body, aim, count, next_aim, next, out, bytes, found, times);
    case 128:
      return read_block_of<128>(body, aim, count, next_aim, next, out, bytes, found, times);
    case 256:
      return read_block_of<256>(body, aim, count, next_aim, next, out, bytes, found, times);
    default:
      return read_block_of<0>(body, aim, count, next_aim, next, out, bytes, found, times);
  }
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

std::size_t Table::lookup(std::span<const std::int64_t> ids, float* out, std::uint8_t* told) const {
  Epochs::Visit visit(epochs_);
  Body& body = *body_.load();
  const std::size_t dim = entry_.dim();
  const bool whole = entry_.serving() || entry_.decays_lazily();  // values alone do not tell what to show
  const std::size_t bytes = whole ? entry_.row_bytes() : entry_.value_bytes();
  const bool direct = !whole && entry_.stores_floats();  // rows are copied to where they are wanted
  std::atomic<std::size_t> hits{0};
  spread(ids.size(), grain_of(ids.size(), workers_.get()), [&](std::size_t begin, std::size_t end) {
    std::uint8_t found[kBlock];
    std::vector<std::byte> rows(direct ? 0 : kBlock * bytes);
    std::size_t hit = 0;
    auto* const to = direct ? reinterpret_cast<std::byte*>(out + begin * dim) : rows.data();
    const std::size_t step = direct ? kBlock * bytes : 0;
    read_blocks(body, ids.subspan(begin, end - begin), to, bytes, step, found, nullptr,
                [&](std::size_t first, std::size_t count) {
                  float* const values = out + (begin + first) * dim;
                  if (told != nullptr) std::copy_n(found, count, told + begin + first);
                  if (!whole && !direct) entry_.read_values(rows.data(), count, values);
                  for (std::size_t i = 0; i < count; ++i) {
                    hit += found[i];
                    if (whole) {
                      if (!found[i])
                        std::fill_n(values + i * dim, dim, 0.0f);
                      else if (entry_.serving())
                        entry_.read(rows.data() + i * bytes, values + i * dim);
                      else
                        entry_.read_decayed(rows.data() + i * bytes, values + i * dim);
                    }
                    if (entry_.has_view() && found[i]) entry_.view(values + i * dim);
                  }
                });
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
  spread(ids.size(), grain_of(ids.size(), workers_.get()), [&](std::size_t begin, std::size_t end) {
    std::uint8_t there[kBlock];
    std::uint32_t seen[kBlock];
    std::vector<std::byte> rows(std::max<std::size_t>(kBlock * bytes, 1));  // somewhere to point to, at least
    read_blocks(body, ids.subspan(begin, end - begin), rows.data(), bytes, 0, there, seen,
                [&](std::size_t first, std::size_t count) {
                  const std::size_t at = begin + first;
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
                      std::memcpy(state + (at + i) * state_dim, entry_.state(row), state_dim * sizeof(float));
                  }
                });
  });
}

}  // namespace monolith
