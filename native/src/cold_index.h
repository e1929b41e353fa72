// ColdIndex: where the cold rows of a table are, at 9 to 10 bytes per row.
//
//   hash of an ID    10 bits: partition | 26 bits: tag | 28 bits, which are not kept
//   entry            26 bits: tag | 38 bits: location; 0 is a free cell
//
// A partition is one array of entries in ascending order with free cells in between: linear probing from a
// home cell that is proportional to the tag. So it is rehashed from the entries alone, walked in the order of
// hashes, and a search ends at the first larger tag. The rest of the hash is in the file, next to the row:
// IDs may share a tag, and a caller compares the whole hash of the row that it reads. With 200,000 rows in a
// partition one ID in 300 has to read another row, too.
//
// 1,024 partitions are few enough that 100,000 rows fill them, and enough that none takes long to grow: its
// entries are copied once whenever there are 4 to 7 % more of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace monolith {

// Not thread-safe: its owner has a lock.
class ColdIndex {
 public:
  static constexpr int kPartitionBits = 10;
  static constexpr int kTagBits = 26;
  static constexpr int kLocationBits = 38;
  static constexpr int kKeptBits = kPartitionBits + kTagBits;  // the leading bits of a hash that it knows
  static constexpr std::uint64_t kLocationMask = (std::uint64_t{1} << kLocationBits) - 1;

  static std::size_t partition_of(std::uint64_t hash) { return hash >> (64 - kPartitionBits); }
  static std::uint64_t tag_of(std::uint64_t hash) {
    return hash >> (64 - kKeptBits) & ((std::uint64_t{1} << kTagBits) - 1);
  }
  // The known bits of the hash of an entry, as a number of kKeptBits bits.
  static std::uint64_t prefix_of(std::size_t partition, std::uint64_t entry) {
    return std::uint64_t{partition} << kTagBits | entry >> kLocationBits;
  }

  std::size_t size() const { return size_; }
  // With what the allocator adds to each array.
  std::size_t bytes() const {
    return cells_ * sizeof(std::uint64_t) + arrays_ * 2 * sizeof(void*) + sizeof(*this);
  }
  // What bytes() is with so many entries, on average: partitions are between two sizes.
  static std::size_t expected_bytes(std::uint64_t entries);

  // Asks for the cells of a hash that will be needed soon.
  void prefetch(std::uint64_t hash) const {
    const Partition& part = parts_[partition_of(hash)];
    if (!part.cells.empty()) __builtin_prefetch(part.cells.data() + part.home(tag_of(hash)), 0);
  }

  // Calls each(location) for the entries that may be of this hash.
  template <class Each>
  void candidates(std::uint64_t hash, Each&& each) const {
    const Partition& part = parts_[partition_of(hash)];
    if (part.cells.empty()) return;
    const std::uint64_t tag = tag_of(hash);
    std::size_t at = part.home(tag);
    while (part.cells[at] != 0 && part.cells[at] >> kLocationBits < tag) ++at;
    for (; part.cells[at] != 0 && part.cells[at] >> kLocationBits == tag; ++at)
      each(part.cells[at] & kLocationMask);
  }

  bool contains(std::uint64_t hash, std::uint64_t location) const {
    bool found = false;
    candidates(hash, [&](std::uint64_t other) { found |= other == location; });
    return found;
  }

  // `location` is from 1 to kLocationMask, and of no other entry.
  void insert(std::uint64_t hash, std::uint64_t location);
  // Whether the entry was there.
  bool erase(std::uint64_t hash, std::uint64_t location);
  // Another location for the same hash; false if the entry is not there.
  bool move(std::uint64_t hash, std::uint64_t from, std::uint64_t to);
  void clear();

  // Calls each(entry) for the entries of a partition in ascending order, from the first with at least this
  // tag on, while it returns true.
  template <class Each>
  void walk(std::size_t partition, std::uint64_t tag, Each&& each) const {
    const Partition& part = parts_[partition];
    if (part.cells.empty()) return;
    for (std::size_t at = part.home(tag); at < part.cells.size(); ++at) {
      const std::uint64_t entry = part.cells[at];
      if (entry != 0 && entry >> kLocationBits >= tag && !each(entry)) return;
    }
  }

 private:
  // `homes` cells that are home cells, then some for entries that are pushed beyond the last of them. The
  // last cell is always free, so that every search ends.
  struct Partition {
    std::vector<std::uint64_t> cells;
    std::uint32_t homes = 0;
    std::uint32_t count = 0;
    std::size_t home(std::uint64_t tag) const { return tag * homes >> kTagBits; }
  };

  void resize(Partition& part, std::size_t homes);
  bool place(Partition& part, std::uint64_t entry);

  std::array<Partition, std::size_t{1} << kPartitionBits> parts_;
  std::size_t size_ = 0;
  std::size_t cells_ = 0;
  std::size_t arrays_ = 0;
};

}  // namespace monolith
