// TableGroup: one call for many tables.
//
// A fused call lays ids out shard by shard and, within a shard, table by table. With
// K tables, sizes[shard * K + table] says how many there are, and embeddings and
// gradients lie in the same order: table.dim() floats per id, nothing in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "table.h"
#include "team_choice.h"
#include "workers.h"

namespace monolith {

struct FusedOffsets {
  std::vector<std::int64_t> ids;          // where each of the pieces begins, then where the last one ends
  std::vector<std::int64_t> floats;       // the same, for what lies at the ids
  std::vector<std::int64_t> recv_splits;  // floats of each shard
};

// `dims` are the widths of the tables. Throws std::invalid_argument unless `sizes` has one entry per
// shard and table, none negative, that add up to `num_ids`.
FusedOffsets fused_offsets(std::span<const std::int64_t> dims, std::span<const std::int64_t> sizes,
                           std::size_t num_shards, std::size_t num_ids);

// The rows that a batch finds in the tables of a group; see TableGroup::find.
struct FoundRows {
  std::vector<std::vector<std::int64_t>>
      ids;                              // by table: distinct ids that have a row, in the order they came
  std::vector<std::int64_t> distinct;   // by table: distinct ids, with a row or without
  std::vector<std::int64_t> sightings;  // by table: positions of the batch whose id has a row
};

// Whole rows that come from elsewhere, for one table; see TableGroup::put.
struct IncomingRows {
  std::span<const std::int64_t> hashes;  // the bits of an id's hash (hash.h)
  std::span<const std::int64_t> times;
  std::span<const std::uint8_t> there;  // 0 for a position without a row
  std::span<const float> values, state;
};

// Safe from any thread, as tables are. What does not fit throws std::invalid_argument before any table
// is touched; a failure after that leaves other tables changed.
class TableGroup {
 public:
  // Tables take turns among `workers`, in addition to the threads of each table.
  explicit TableGroup(std::vector<std::shared_ptr<Table>> tables, std::shared_ptr<Workers> workers = nullptr);

  // Floats of one embedding per id: how long `out` of a lookup is.
  std::size_t num_floats(std::span<const std::int64_t> sizes, std::size_t num_shards,
                         std::size_t num_ids) const {
    return static_cast<std::size_t>(offsets(sizes, num_shards, num_ids).floats.back());
  }

  // Fills `out` with one embedding per id, zeros where there is no row.
  void lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes, std::size_t num_shards,
              std::span<float> out) const;

  // Each table takes its ids of all shards, in shard order, in one call; with `dedup` equal ids of a
  // table become one step, whichever shards they came from.
  struct Gradients {
    std::span<const float> values;
    std::span<const float> latest;  // like `values`; empty unless a table is delay-compensated
    std::span<const float> rates;   // one per segment, table after table
    std::int64_t step = 0;
    std::span<const std::uint32_t> times;  // one for all ids, or one for each
    bool dedup = false;
    std::span<const std::uint32_t> counts = {};  // how often each id was seen; empty for once
  };
  void apply_gradients(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
                       std::size_t num_shards, const Gradients& gradients) const;

  // Which ids of one batch, table after table, have a row. An id is searched for once, however often it came.
  FoundRows find(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes) const;

  // Moves whole rows out of the tables, in the order of `found.ids`, table after table: copies them, then
  // removes them. No other thread may write to the tables since `find`.
  struct RowColumns {
    std::span<std::int64_t> ids, times;
    std::span<float> values, state;  // dim() and state_dim() floats per row of each table
  };
  void take(const FoundRows& found, const RowColumns& rows) const;

  // The way back: restores rows, an entry of `rows` for each table. Returns how many each table was given.
  std::vector<std::size_t> put(std::span<const IncomingRows> rows) const;

 private:
  FusedOffsets offsets(std::span<const std::int64_t> sizes, std::size_t num_shards,
                       std::size_t num_ids) const;
  void check(const Gradients& gradients, const FusedOffsets& offsets) const;
  void each(std::size_t tasks, const std::function<void(std::size_t)>& work) const;

  const std::vector<std::shared_ptr<Table>> tables_;
  const std::shared_ptr<Workers> workers_;
  std::vector<std::int64_t> dims_;
  mutable TeamChoice reading_, training_;
};

}  // namespace monolith
