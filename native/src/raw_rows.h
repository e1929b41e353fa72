// RawRows: rows at known positions, with no index, no ids and no locks.
//
// The limit that a table is measured against: the same rows in the same kind of
// memory, read and changed as fast as the machine allows by someone who already
// knows where each one is.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "memory.h"
#include "workers.h"

namespace monolith {

class RawRows {
 public:
  // `rows` rows of `width` floats to read and `width` more of state behind them.
  RawRows(std::size_t rows, std::size_t width, std::shared_ptr<Workers> workers);

  std::size_t rows() const { return rows_; }
  std::size_t width() const { return width_; }

  // Copies the first `copied` floats of each row to `out`: width() for the values, twice that for the whole
  // row. Throws std::invalid_argument for a position past the last row.
  void gather(std::span<const std::uint32_t> positions, std::size_t copied, float* out) const;
  // Reads, changes and writes whole rows: values and state, as an optimizer would, without its arithmetic.
  void update(std::span<const std::uint32_t> positions, const float* gradients);

 private:
  template <class Each>
  void spread(std::span<const std::uint32_t> positions, Each&& each) const;

  const std::size_t rows_;
  const std::size_t width_;
  const std::shared_ptr<Workers> workers_;
  Region memory_;
};

}  // namespace monolith
