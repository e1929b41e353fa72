// OverlaidGroup: rows that changed, over rows that were written once.
//
// Each table has a mapped file below and a Table above it. A row above counts, whatever is below; an id that
// is gone has a row of zeros above. So a reader sees a row as a whole, before a change or after it, and
// a writer to the tables above never waits for a reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "frozen_table.h"
#include "table.h"
#include "workers.h"

namespace monolith {

// One call for many tables, laid out as a TableGroup has it. Safe from any thread.
class OverlaidGroup {
 public:
  // Table by table, of equal widths. Throws std::invalid_argument unless they are.
  OverlaidGroup(std::vector<std::shared_ptr<const FrozenTable>> below,
                std::vector<std::shared_ptr<const Table>> above, std::shared_ptr<Workers> workers = nullptr);

  void lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes, std::size_t num_batches,
              std::span<float> out) const;

 private:
  void fill_in(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
               std::size_t num_batches, const std::vector<std::uint8_t>& found, std::size_t missing,
               std::span<float> out) const;

  const FrozenGroup below_;
  const std::vector<std::shared_ptr<const Table>> above_;
  std::vector<std::int64_t> dims_;
};

}  // namespace monolith
