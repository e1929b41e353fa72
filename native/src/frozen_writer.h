// FrozenWriter: rows into the bytes of a frozen table's file, from its beginning to its end.
//
// It knows no file: the caller appends what it is handed, in that order. Rows leave as they come; of each,
// only the id is remembered, from which the index is made at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "frozen_format.h"

namespace monolith {

class FrozenWriter {
 public:
  // At most `max_rows` will come. Throws std::invalid_argument for segments that no file can have.
  FrozenWriter(std::vector<FrozenSegment> segments, std::string name, std::uint64_t max_rows);

  std::size_t dim() const { return dim_; }
  std::size_t row_bytes() const { return row_bytes_; }

  // What the file begins with. Once, first.
  FrozenHead begin();
  // dim() floats for each id become row_bytes() bytes for each in `out`. Throws std::invalid_argument where a
  // value is not finite, or rows are more than were announced; then this writer is of no use any more.
  void add(std::span<const std::int64_t> ids, std::span<const float> values, std::span<std::byte> out);
  // All that follows the rows. Once, last. Throws std::invalid_argument where an id came twice.
  std::vector<std::byte> finish();

  std::uint64_t rows() const { return ids_.size(); }
  std::uint64_t bytes() const { return bytes_; }  // of the file so far
  std::uint32_t crc() const { return crc_; }      // of the file so far
  // Of values as a reader gets them against those given.
  double largest_error() const { return largest_error_; }
  double mean_error() const { return ids_.empty() ? 0 : error_sum_ / (double(ids_.size()) * double(dim_)); }

 private:
  void encode(std::int64_t id, const float* values, std::byte* row);
  void note_error(float given, float decoded);
  void append(std::span<const std::byte> bytes, bool checked);
  std::uint32_t place_ids(std::span<FrozenBucket> buckets) const;

  const std::vector<FrozenSegment> segments_;
  const std::string name_;
  const std::uint64_t max_rows_;
  const std::size_t row_bytes_;
  std::size_t dim_ = 0;
  std::vector<std::int64_t> ids_;  // by number of their row
  std::uint64_t bytes_ = 0;
  std::uint32_t crc_ = 0;
  std::vector<std::uint32_t> checksums_;  // the last one of a MiB that is not full yet
  double largest_error_ = 0;
  double error_sum_ = 0;
};

}  // namespace monolith
