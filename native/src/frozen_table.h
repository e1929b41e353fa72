// FrozenTable: ids to rows that were written once, read where the file lies in memory.
//
// The file is mapped: opening reads its end, a lookup reads the lines it needs, and processes
// that map the same file share its memory. Calls are batches, and go through the stages that Table has: where
// the ids belong, what their index lines say, their rows, with many cache misses under way at once. A call
// over many tables goes through them as if they were one.
//
// A file may be damaged, or made by an attacker. All sizes and offsets are checked against each
// other and against the length of the file before one is used, and the number of a row whenever it is; so
// nothing outside of the file is read. That the bytes are those once written, only `verify` says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "block_reader.h"
#include "frozen_format.h"
#include "row_cache.h"
#include "workers.h"

namespace monolith {

// Never changes once it is in use, so safe from any thread.
class FrozenTable {
 public:
  // Reads `file`, which begins at a multiple of 64 and stays as long as `owner` does. `path` is for messages.
  FrozenTable(std::span<const std::byte> file, std::shared_ptr<const void> owner, std::string path);

  std::size_t dim() const { return dim_; }
  std::uint64_t rows() const { return trailer_.rows; }
  std::size_t bytes() const { return file_.size(); }
  std::span<const FrozenSegment> segments() const { return segments_; }
  const std::string& name() const { return name_; }
  const std::string& path() const { return path_; }
  const FrozenTrailer& trailer() const { return trailer_; }

  // How many bytes the index has, and a row in the memory of a table that is bounded.
  std::size_t index_bytes() const { return trailer_.buckets * sizeof(FrozenBucket); }
  std::size_t kept_row_bytes() const { return RowCache::bytes_of(trailer_.row_bytes); }
  // Before the first lookup: copies the index to memory, and has lookups keep only so many bytes of rows
  // there and read all others from `descriptor`, a batch at once. `scan`, `matches` and `verify` read the
  // mapping.
  void bound_memory(int descriptor, std::size_t row_bytes, std::shared_ptr<BlockReader> reader);
  // Of a table that is bounded; bytes include the index.
  RowCache::Stats cache_stats() const;

  // Fills `out` with dim() floats for each id, zeros where there is no row.
  void lookup(std::span<const std::int64_t> ids, float* out) const;

  // Whether each id has a row.
  void contains(std::span<const std::int64_t> ids, std::uint8_t* found) const;
  // Whether each id has a row of the bytes that these values, dim() for each, would be written as.
  void matches(std::span<const std::int64_t> ids, const float* values, std::uint8_t* same) const;
  // The rows whose ids hash to `first` to `last`, both included, in no order.
  struct Scanned {
    std::vector<std::int64_t> ids;
    std::vector<float> values;  // ids x dim
  };
  Scanned scan(std::uint64_t first, std::uint64_t last) const;

  // Checks `bytes` from `from` on, in whole MiB, against their checksums; all there is to check ends at
  // checked_bytes().
  void verify(std::size_t from, std::size_t bytes) const;
  std::size_t checked_bytes() const { return trailer_.checksums_at; }
  // Brings a part of the file into memory, where lookups will find it.
  void prefault(std::size_t from, std::size_t bytes) const;

 private:
  friend class FrozenBatch;

  // A run of values that are coded alike.
  struct Step {
    FrozenCoding coding;
    std::uint32_t dim;
    std::size_t at;  // in the row
  };

  void open();
  void read_about();
  [[noreturn]] void refuse(std::uint64_t offset, const std::string& reason) const;
  const FrozenBucket* home(std::int64_t id) const { return buckets_ + frozen_home(id, trailer_.buckets); }
  // The row of an id that bucket `at` says, null where it says none.
  const std::byte* look(const FrozenBucket* at, std::int64_t id) const;
  const std::byte* look_on(const FrozenBucket* at, std::int64_t id) const;
  const std::byte* find(std::int64_t id) const;
  const std::byte* row_at(const FrozenBucket* bucket, std::uint32_t place) const;
  void decode(const std::byte* row, float* out) const;

  const std::span<const std::byte> file_;
  const std::shared_ptr<const void> owner_;
  const std::string path_;
  FrozenTrailer trailer_;
  std::string name_;
  std::vector<FrozenSegment> segments_;
  std::vector<Step> steps_;
  std::size_t dim_ = 0;
  const std::byte* rows_ = nullptr;
  const FrozenBucket* buckets_ = nullptr;
  std::vector<std::byte> no_row_;          // zeros, which all codings read as zeros
  std::unique_ptr<FrozenBucket[]> index_;  // of a table that is bounded, as is
  std::unique_ptr<RowCache> cache_;
};

// One call for many tables, laid out as a TableGroup has it.
class FrozenGroup {
 public:
  explicit FrozenGroup(std::vector<std::shared_ptr<const FrozenTable>> tables,
                       std::shared_ptr<Workers> workers = nullptr);

  void lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes, std::size_t num_batches,
              std::span<float> out) const;

 private:
  const std::vector<std::shared_ptr<const FrozenTable>> tables_;
  const std::shared_ptr<Workers> workers_;
  std::vector<std::int64_t> dims_;
};

}  // namespace monolith
