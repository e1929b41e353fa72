#include "routes.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "table_group.h"

namespace monolith {
namespace {

constexpr std::size_t kMostServers = std::numeric_limits<std::uint16_t>::max();

void check(const char* what, std::size_t expected, std::size_t got) {
  if (expected != got)
    throw std::invalid_argument(std::string(what) + ": expected " + std::to_string(expected) + ", got " +
                                std::to_string(got));
}

template <class Spans>
void check_each(const char* what, std::span<const std::int64_t> expected, const Spans& spans) {
  check("one array for each server", expected.size(), spans.size());
  for (std::size_t server = 0; server < spans.size(); ++server)
    check(what, static_cast<std::size_t>(expected[server]), spans[server].size());
}

// Rows of the widths that models have are moved by a few instructions, not by a call.
template <std::size_t kWidth>
void move_row(float* to, const float* from) {
  std::memcpy(to, from, kWidth * sizeof(float));
}

}  // namespace

Routes::Routes(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
               std::span<const std::int64_t> widths, std::size_t num_batches, std::size_t num_servers) {
  if (num_servers == 0 || num_servers > kMostServers)
    throw std::invalid_argument("servers must be from 1 to " + std::to_string(kMostServers) + ", got " +
                                std::to_string(num_servers));
  floats_ = fused_offsets(widths, sizes, num_batches, ids.size()).floats.back();
  cells_.reserve(sizes.size());
  for (std::size_t cell = 0; cell < sizes.size(); ++cell)
    cells_.push_back(
        {static_cast<std::size_t>(sizes[cell]), static_cast<std::size_t>(widths[cell % widths.size()])});
  sizes_.assign(num_servers * cells_.size(), 0);
  if (num_servers == 1) {
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  } else {
    servers_.resize(ids.size());
    std::size_t at = 0;
    for (std::size_t cell = 0; cell < cells_.size(); ++cell) {
      for (const std::size_t end = at + cells_[cell].ids; at < end; ++at) {
        const auto server = static_cast<std::uint16_t>(static_cast<std::uint64_t>(ids[at]) % num_servers);
        servers_[at] = server;
        ++sizes_[server * cells_.size() + cell];
      }
    }
  }
  num_ids_.assign(num_servers, 0);
  num_floats_.assign(num_servers, 0);
  for (std::size_t server = 0; server < num_servers; ++server) {
    for (std::size_t cell = 0; cell < cells_.size(); ++cell) {
      const std::int64_t size = sizes_[server * cells_.size() + cell];
      num_ids_[server] += size;
      num_floats_[server] += size * static_cast<std::int64_t>(cells_[cell].width);
    }
  }
}

void Routes::spread_numbers(std::span<const std::int64_t> numbers,
                            std::span<const std::span<std::int64_t>> to) const {
  check_each("numbers of a server", num_ids_, to);
  std::size_t total = 0;
  for (const std::int64_t count : num_ids_) total += static_cast<std::size_t>(count);
  check("numbers", total, numbers.size());
  if (servers_.empty()) {
    std::copy(numbers.begin(), numbers.end(), to[0].begin());
    return;
  }
  std::vector<std::int64_t*> next;
  next.reserve(to.size());
  for (const auto& one : to) next.push_back(one.data());
  for (std::size_t at = 0; at < numbers.size(); ++at) *next[servers_[at]]++ = numbers[at];
}

// Calls move(server, position among the floats, width) for each row, in order.
template <class Move>
void Routes::each_row(Move move) const {
  std::size_t at = 0, first = 0;
  for (const Cell& cell : cells_) {
    for (std::size_t one = 0; one < cell.ids; ++one) {
      move(servers_[first + one], at, cell.width);
      at += cell.width;
    }
    first += cell.ids;
  }
}

void Routes::spread_rows(std::span<const float> rows, std::span<const std::span<float>> to) const {
  check_each("floats of a server", num_floats_, to);
  check("floats", static_cast<std::size_t>(floats_), rows.size());
  if (servers_.empty()) {
    if (num_servers() == 1) std::copy(rows.begin(), rows.end(), to[0].begin());
    return;
  }
  std::vector<float*> next;
  next.reserve(to.size());
  for (const auto& one : to) next.push_back(one.data());
  each_row([&](std::uint16_t server, std::size_t at, std::size_t width) {
    float* const target = next[server];
    if (width == 16)
      move_row<16>(target, rows.data() + at);
    else
      std::memcpy(target, rows.data() + at, width * sizeof(float));
    next[server] = target + width;
  });
}

void Routes::gather_rows(std::span<const std::span<const float>> from, std::span<float> rows) const {
  check_each("floats of a server", num_floats_, from);
  check("floats", static_cast<std::size_t>(floats_), rows.size());
  if (servers_.empty()) {
    if (num_servers() == 1) std::copy(from[0].begin(), from[0].end(), rows.begin());
    return;
  }
  std::vector<const float*> next;
  next.reserve(from.size());
  for (const auto& one : from) next.push_back(one.data());
  each_row([&](std::uint16_t server, std::size_t at, std::size_t width) {
    const float* const source = next[server];
    if (width == 16)
      move_row<16>(rows.data() + at, source);
    else
      std::memcpy(rows.data() + at, source, width * sizeof(float));
    next[server] = source + width;
  });
}

}  // namespace monolith
