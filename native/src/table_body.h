// The internals of a table, for table.cc, table_read.cc and table_write.cc.
//
//   Body         all that clear() replaces: arenas of rows, indexes, partitions, directory
//   Directory    leading bits of a hash -> Partition, and a copy of its Index for readers
//   Partition    the rows of one range of hashes (partition.h)
//   Batch        scratch of one call that writes: its ids grouped by partition
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "hash.h"
#include "table.h"

namespace monolith {

// A partition splits when it holds more rows than this, the more the more partitions there are already. Few
// large ones make a directory that stays in the nearest cache, and bring many ids of a batch to each; many
// small ones split faster, and let more threads write. A split should stay a matter of a few milliseconds.
inline constexpr std::uint32_t kPartitionRows = 16384;
inline std::uint32_t partition_limit(std::size_t partitions) {
  return kPartitionRows * (partitions < 64 ? 1 : partitions < 128 ? 2 : partitions < 512 ? 4 : 8);
}
// An index array is made this full, and replaced when it is that full. At most `kBrimLoad` when the
// budget allows no larger one.
inline constexpr double kFreshLoad = 0.62;
inline constexpr double kFullLoad = 0.70;
inline constexpr double kBrimLoad = 0.94;
// Ids that a writer works on together, under one change of a partition's version, at most.
inline constexpr std::size_t kWindow = 256;

// From the leading bits of a hash to its partition, which may be that of many cells. Replaced when it must
// tell more bits apart.
struct Table::Directory {
  explicit Directory(int depth)
      : depth(depth),
        partitions(new std::atomic<Partition*>[std::size_t{1} << depth]),
        indexes(new std::atomic<Index>[std::size_t{1} << depth]) {}

  std::size_t size() const { return std::size_t{1} << depth; }
  std::size_t bytes() const { return size() * (sizeof(partitions[0]) + sizeof(indexes[0])); }
  std::size_t number(std::uint64_t hash) const { return hash >> 1 >> (63 - depth); }
  Partition* partition(std::uint64_t hash) const {
    return partitions[number(hash)].load(std::memory_order_acquire);
  }
  Index index(std::uint64_t hash) const { return indexes[number(hash)].load(kFollowed); }

  // Leads a range of hashes to `part` and its index.
  void point(Partition& part) const {
    const Index index = part.index.load(kFollowed);
    for (std::size_t i = number(part.first); i <= number(part.last); ++i) {
      indexes[i].store(index, std::memory_order_release);
      partitions[i].store(&part, std::memory_order_release);
    }
  }

  const int depth;
  const std::unique_ptr<std::atomic<Partition*>[]> partitions;
  // Copies of the partitions' indexes: a reader that meets no writer needs no line of the partition.
  const std::unique_ptr<std::atomic<Index>[]> indexes;
};

// Everything that clear() replaces at once.
struct Table::Body {
  Body(std::size_t row_bytes, Budget& budget) : rows(row_bytes, budget), heap(budget) {}
  ~Body() {
    for (auto& partition : partitions) {
      const Index index = partition->index.load();
      if (index.slots() != nullptr) heap.free(index.slots(), index.bytes());
    }
    delete directory.load();
  }

  Partition* route(std::uint64_t hash) const {
    return directory.load(std::memory_order_acquire)->partition(hash);
  }

  int depth() const {
    std::lock_guard lock(mutex);
    return directory.load()->depth;
  }

  // Asks for the index line of a hash that will be needed soon. A hint: it may be out of date.
  template <int kWrite>
  void prefetch(std::uint64_t hash) const {
    directory.load(kFollowed)->index(hash).prefetch<kWrite>(hash);
  }

  RowArenas rows;
  IndexHeap heap;
  std::atomic<Directory*> directory{nullptr};
  mutable std::mutex mutex;  // guards partitions, and changes of the directory
  std::vector<std::unique_ptr<Partition>> partitions;
};

// Memory for `size` things of a kind that needs no construction; kept between calls.
template <class T>
class Scratch {
 public:
  T* ensure(std::size_t size) {
    if (size > capacity_) {
      capacity_ = std::max(size, capacity_ + capacity_ / 2);
      data_.reset(new T[capacity_]);
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t capacity_ = 0;
};

// The scratch of one call that writes: its ids grouped by the leading bits of their hashes.
struct Table::Batch {
  Scratch<Item> items;
  Scratch<std::uint32_t> next;        // dedup: from one sighting of an id to the one after it
  Scratch<std::uint32_t> times;       // dedup with a time for each id: those times, merged
  Scratch<std::uint32_t> sightings;   // dedup with a count for each id: those counts, merged
  std::vector<std::uint32_t> starts;  // where each group begins, and one past the last
  std::vector<std::uint32_t> counts;  // chunks x groups, while grouping
};

// A change of a partition, from begin_write to end_write whatever happens between.
class Change {
 public:
  explicit Change(Partition& part) : part_(part) { part_.begin_write(); }
  ~Change() { part_.end_write(); }
  Change(const Change&) = delete;

 private:
  Partition& part_;
};

// A call that writes, from passing the gate of the table to leaving. clear() cannot replace the body
// meanwhile; memory that a resize or a split replaces, such as the directory, needs an Epochs::Visit, too.
class Table::Writing {
 public:
  explicit Writing(Table& table) : table_(table) {
    std::unique_lock lock(table_.gate_mutex_);
    table_.gate_changed_.wait(lock, [&] { return table_.frozen_ == 0; });
    ++table_.writers_;
    table_.writes_begun_.fetch_add(1);
  }
  ~Writing() {
    table_.writes_ended_.fetch_add(1);
    table_.epochs_.collect();
    std::lock_guard lock(table_.gate_mutex_);
    if (--table_.writers_ == 0) table_.gate_changed_.notify_all();
  }

 private:
  Table& table_;
};

// Pauses calls that write while it lives: it closes the gate, then waits until the last writer has left.
// Pauses nest; `kAlone` first waits until no other pause is left, as a write would. RAII, so that an
// exception can never leave writers waiting.
class Table::PausedWriters {
 public:
  enum Kind { kNested, kAlone };

  explicit PausedWriters(Table& table, Kind kind = kNested) : table_(table) {
    std::unique_lock lock(table_.gate_mutex_);
    if (kind == kAlone) table_.gate_changed_.wait(lock, [&] { return table_.frozen_ == 0; });
    ++table_.frozen_;
    table_.gate_changed_.wait(lock, [&] { return table_.writers_ == 0; });
  }
  ~PausedWriters() { table_.thaw(); }
  PausedWriters(const PausedWriters&) = delete;

 private:
  Table& table_;
};

template <class Each>
void Table::spread(std::size_t count, std::size_t grain, Each&& each) const {
  spread_out(workers_.get(), count, grain, each);
}

template <class Run>
void Table::each_run(const Batch& batch, std::size_t count, Run&& run) const {
  const std::size_t groups = batch.starts.size() - 1;
  const std::size_t threads = workers_ != nullptr ? workers_->at_hand() : 1;
  const std::size_t target = std::clamp<std::size_t>(count / (threads * 8), 512, 16384);
  std::vector<std::size_t> cuts{0};
  for (std::size_t g = 1; g < groups; ++g)
    if (batch.starts[g] - batch.starts[cuts.back()] >= target) cuts.push_back(g);
  cuts.push_back(groups);
  spread(cuts.size() - 1, 1, [&](std::size_t first, std::size_t last) {
    for (std::size_t task = first; task < last; ++task) run(cuts[task], cuts[task + 1]);
  });
}

}  // namespace monolith
