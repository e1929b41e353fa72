// Partition: the rows of one range of hashes.
//
// An open-addressing index in cache lines of four slots, the rows its ids own,
// and the lock under which they change. Partitions stay small: a full one splits
// in two, so no growth ever stops the table for long.
//
// Readers take no lock. They note the version, read, and look at the version
// again: odd, or not the one they noted, means a writer was here and the read
// does not count.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>

namespace monolith {

struct Slot {
  std::uint64_t hash;  // stands for the id: see hash.h
  std::uint32_t row;   // 0 is an empty slot
  std::uint32_t time;  // seconds; of the row's last update
};
static_assert(sizeof(Slot) == 16);
// Row and time as one word, row in the low half.
using Meta __attribute__((may_alias)) = std::uint64_t;
static_assert(std::endian::native == std::endian::little);

// Fields that a reader may look at while a writer changes them.
template <class T>
void poke(T& field, T value) {
  __atomic_store_n(&field, value, __ATOMIC_RELAXED);
}

// The order of a load whose result leads to other memory: a pointer, or a row number. It pairs with the
// release that published the memory. A plain load on x86; one ldar or ldapr on ARM.
inline constexpr std::memory_order kFollowed = std::memory_order_acquire;

template <class T>
T peek(const T& field) {
  return __atomic_load_n(&field, static_cast<int>(kFollowed));
}

inline constexpr int kBucketSlots = 4;  // one cache line

// Where an index array is and how many buckets it has, in one word so that the two are never of
// different arrays: 42 bits of address (arrays are aligned to 64), 22 bits of count.
class Index {
 public:
  static constexpr std::uint32_t kMaxBuckets = (1u << 22) - 1;

  Index() = default;
  Index(Slot* slots, std::uint32_t buckets)
      : word_(reinterpret_cast<std::uintptr_t>(slots) >> 6 << 22 | buckets) {}

  Slot* slots() const { return reinterpret_cast<Slot*>(word_ >> 22 << 6); }
  std::uint32_t buckets() const { return word_ & kMaxBuckets; }
  std::size_t size() const { return std::size_t{buckets()} * kBucketSlots; }
  std::size_t bytes() const { return size() * sizeof(Slot); }
  static std::size_t bytes(std::uint32_t buckets) {
    return std::size_t{buckets} * kBucketSlots * sizeof(Slot);
  }

  // The bucket where a hash belongs. It reads the low half; the directory reads the high bits.
  std::uint32_t home(std::uint64_t hash) const {
    return static_cast<std::uint32_t>((hash & 0xffffffff) * buckets() >> 32);
  }

  // A bucket's slot for `hash`, found without a branch on where it is; null when it is not in this line.
  static Slot* match(Slot* bucket, std::uint64_t hash) {
    unsigned where = unsigned{peek(bucket[0].hash) == hash} | unsigned{peek(bucket[1].hash) == hash} << 1 |
                     unsigned{peek(bucket[2].hash) == hash} << 2 |
                     unsigned{peek(bucket[3].hash) == hash} << 3;
    asm(""
        : "+r"(where));  // or the compiler makes the last comparison a jump, which is wrong every fourth time
    return where != 0 ? bucket + std::countr_zero(where) : nullptr;
  }
  // The same for a writer, who holds the lock: the slot for `hash` or else the last one, without a jump. If
  // that one is another's the line is full, and the search continues in the next; if it is empty, it ends
  // here.
  static Slot* nearest(Slot* bucket, std::uint64_t hash) {
    const std::uint64_t held[] = {bucket[0].hash, bucket[1].hash, bucket[2].hash};
    std::size_t at = 3;
    at = held[2] == hash ? 2 : at;
    at = held[1] == hash ? 1 : at;
    at = held[0] == hash ? 0 : at;
    asm("" : "+r"(at));
    return bucket + at;
  }
  // What a bucket holds for `hash`, for readers: row and time, both 0 when it is not in this line, and
  // whether the line is full. Few loads and no jump that depends on what they bring. While a writer moves a
  // slot, two may match for a moment: the row is then neither's, but its highest bit is that of the larger,
  // so it lies in an arena that exists, and the reader will find out that it met a writer.
  struct Seen {
    std::uint32_t row;
    std::uint32_t time;
    bool full;
  };
  static Seen look(const Slot* bucket, std::uint64_t hash) {
    std::uint64_t meta = 0;
    std::uint64_t last = 0;
#pragma GCC unroll 4
    for (int i = 0; i < kBucketSlots; ++i) {
      const std::uint64_t held = peek(bucket[i].hash);
      last = peek(reinterpret_cast<const Meta&>(bucket[i].row));
      meta |= held == hash ? last : 0;
    }
    asm("" : "+r"(meta));
    return {static_cast<std::uint32_t>(meta), static_cast<std::uint32_t>(meta >> 32),
            static_cast<std::uint32_t>(last) != 0};
  }
  Slot* bucket_of(std::uint64_t hash) const { return slots() + std::size_t{home(hash)} * kBucketSlots; }

  // The first slot of the line behind one's last.
  Slot* behind(Slot* last) const { return last + 1 == slots() + size() ? slots() : last + 1; }

  // The slot that holds `hash`, or null. Slots fill in order from the home bucket on and deletion leaves
  // no gap, so the search ends at the first bucket with room.
  Slot* find(std::uint64_t hash) const {
    Slot* bucket = bucket_of(hash);
    for (std::uint32_t probes = buckets(); probes > 0; --probes) {
      // An empty slot holds hash 0, which is also the hash of id 0.
      if (Slot* slot = match(bucket, hash)) return peek(slot->row) != 0 ? slot : nullptr;
      if (peek(bucket[kBucketSlots - 1].row) == 0) return nullptr;
      bucket = behind(bucket + kBucketSlots - 1);
    }
    return nullptr;
  }

  // Asks for the line of a hash: kWrite 1 to change it, 0 to read it.
  template <int kWrite>
  void prefetch(std::uint64_t hash) const {
    __builtin_prefetch(bucket_of(hash), kWrite);
  }

  // Puts a hash that is not there into the first free slot. There must be one.
  Slot* place(std::uint64_t hash, std::uint32_t row, std::uint32_t time) const {
    Slot* all = slots();
    const std::size_t count = size();
    std::size_t at = std::size_t{home(hash)} * kBucketSlots;
    while (all[at].row != 0)
      if (++at == count) at = 0;
    poke(all[at].hash, hash);
    poke(all[at].time, time);
    // A reader that sees the row number must also see the arena it is in; it gets there through the number.
    __atomic_store_n(&all[at].row, row, __ATOMIC_RELEASE);
    return all + at;
  }

  // Empties a slot and moves later ones up, so that every hash is still found from its home.
  void erase(Slot* slot) const {
    Slot* all = slots();
    const std::size_t count = size();
    std::size_t hole = slot - all;
    for (std::size_t at = hole;;) {
      if (++at == count) at = 0;
      if (all[at].row == 0) break;
      const std::size_t from = std::size_t{home(all[at].hash)} * kBucketSlots;
      const std::size_t distance = at >= from ? at - from : at + count - from;
      const std::size_t to_hole = at >= hole ? at - hole : at + count - hole;
      if (distance < to_hole) continue;  // its home lies behind the hole
      poke(all[hole].hash, all[at].hash);
      poke(all[hole].time, all[at].time);
      poke(all[hole].row, all[at].row);
      hole = at;
    }
    poke(all[hole].hash, std::uint64_t{0});
    poke(all[hole].time, 0u);
    poke(all[hole].row, 0u);
  }

 private:
  std::uint64_t word_ = 0;
};
static_assert(sizeof(Index) == 8);

struct CapturedRows;  // see table_snapshot.h

struct alignas(64) Partition {
  Partition();
  ~Partition();

  // What readers look at, in one cache line. Changed only between begin_write and end_write.
  std::atomic<std::uint64_t> version{0};
  std::atomic<Index> index;
  std::atomic<std::uint64_t> first{0};                 // its range of hashes,
  std::atomic<std::uint64_t> last{~std::uint64_t{0}};  // both included

  alignas(64) std::mutex mutex;  // guards everything below, and every write above and to the rows
  std::uint32_t rows = 0;
  std::uint32_t split_at = 0;   // when it holds more rows than this it splits
  std::uint32_t free_rows = 0;  // a list threaded through the rows themselves
  std::uint32_t free_count = 0;
  std::uint32_t chunk_next = 0;  // rows of the current chunk that were never used
  std::uint32_t chunk_end = 0;
  std::uint64_t inserted = 0;
  std::uint64_t filtered = 0;
  std::uint64_t refused = 0;
  std::uint64_t evicted = 0;
  std::uint64_t removed = 0;
  std::unique_ptr<CapturedRows> captured;  // set once a row changes while a snapshot is open

  bool owns(std::uint64_t hash) const {
    return first.load(std::memory_order_relaxed) <= hash && hash <= last.load(std::memory_order_relaxed);
  }

  // A sequence lock: the version is odd while a writer, who holds the mutex, changes something. The fence
  // keeps the changes behind the odd version, and the release of end_write keeps them before the even one.
  // Readers pair with both by an acquiring load before and a fence after what they read (Table::read_one).
  void begin_write() {
    version.store(version.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  void end_write() { version.store(version.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
};

}  // namespace monolith
