// Routes: which rows of a call go to which server, and the way back into the caller's order.
//
// An id lives on the server that its value modulo their number says, as an unsigned one. What a server is
// sent has the layout of a whole call, batch after batch and table after table, in the caller's order: so
// one pass over the ids, with a place to write to for each server, spreads a call, and the same pass with
// places to read from puts answers together. Only the server of each id is remembered.
//
// A request is one buffer: int64 sizes of its cells, then the arrays of numbers, then the arrays of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace monolith {

class Routes {
 public:
  // Throws std::invalid_argument where sizes, widths and ids do not fit: see fused_offsets.
  Routes(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
         std::span<const std::int64_t> widths, std::size_t num_batches, std::size_t num_servers);

  std::size_t num_servers() const { return num_ids_.size(); }
  std::size_t num_cells() const { return cells_.size(); }
  std::int64_t floats() const { return floats_; }  // of all rows
  // Ids of each cell that each server gets, server after server.
  std::span<const std::int64_t> sizes() const { return sizes_; }
  std::span<const std::int64_t> num_ids() const { return num_ids_; }
  std::span<const std::int64_t> num_floats() const { return num_floats_; }

  // Each takes one span per server, as long as num_ids or num_floats says, and throws
  // std::invalid_argument where one is not.
  void spread_numbers(std::span<const std::int64_t> numbers,
                      std::span<const std::span<std::int64_t>> to) const;
  void spread_rows(std::span<const float> rows, std::span<const std::span<float>> to) const;
  void gather_rows(std::span<const std::span<const float>> from, std::span<float> rows) const;

  // Bytes of the request to each server, with so many arrays of one number per id and of one row per id.
  std::vector<std::size_t> request_bytes(std::size_t numbers, std::size_t rows) const;
  // Writes the request to each server into its span, which begins at a multiple of 8 and is as long as
  // request_bytes says; throws std::invalid_argument where one does not, before anything is written.
  void write_requests(std::span<const std::span<const std::int64_t>> numbers,
                      std::span<const std::span<const float>> rows,
                      std::span<const std::span<std::byte>> to) const;

 private:
  struct Cell {
    std::size_t ids;
    std::size_t width;
  };
  template <class ServerOf>
  void assign(std::span<const std::int64_t> ids, ServerOf server_of);
  template <class Move>
  void each_row(Move move) const;

  std::vector<Cell> cells_;
  std::vector<std::uint16_t> servers_;  // of each id; empty where there is one server
  std::vector<std::int64_t> sizes_, num_ids_, num_floats_;
  std::size_t ids_ = 0;
  std::int64_t floats_ = 0;
};

}  // namespace monolith
