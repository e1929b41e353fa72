#include "routes.h"

#include <algorithm>
#include <bit>
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

// The remainder of any 64-bit number, by multiplications: a division of 64 bits takes about 40 cycles, which
// for a call of 10,000 ids is more than all the copying. The halves are reduced one by one, each as in
// Lemire, Kaser and Kurz, "Faster remainder by direct computation" (2019), which is exact for 32 bits.
class Remainder {
 public:
  // `divisor` has at most 16 bits: the halves put together stay below 2^32.
  explicit Remainder(std::uint32_t divisor)
      : divisor_(divisor),
        inverse_(std::numeric_limits<std::uint64_t>::max() / divisor + 1),
        high_(static_cast<std::uint32_t>((std::uint64_t{1} << 32) % divisor)) {}

  std::uint32_t operator()(std::uint64_t number) const {
    const std::uint32_t upper = of(static_cast<std::uint32_t>(number >> 32));
    return of(upper * high_ + of(static_cast<std::uint32_t>(number)));
  }

 private:
  __extension__ using Wide = unsigned __int128;

  std::uint32_t of(std::uint32_t number) const {
    return static_cast<std::uint32_t>((static_cast<Wide>(inverse_ * number) * divisor_) >> 64);
  }

  std::uint32_t divisor_;
  std::uint64_t inverse_;
  std::uint32_t high_;  // 2^32 modulo the divisor
};

// The next `size` values of a buffer.
template <class T>
std::span<T> take(std::byte*& at, std::size_t size) {
  const std::span<T> found(reinterpret_cast<T*>(at), size);
  at += found.size_bytes();
  return found;
}

}  // namespace

template <class ServerOf>
void Routes::assign(std::span<const std::int64_t> ids, ServerOf server_of) {
  servers_.resize(ids.size());
  std::size_t at = 0;
  for (std::size_t cell = 0; cell < cells_.size(); ++cell) {
    for (const std::size_t end = at + cells_[cell].ids; at < end; ++at) {
      const auto server = static_cast<std::uint16_t>(server_of(static_cast<std::uint64_t>(ids[at])));
      servers_[at] = server;
      ++sizes_[server * cells_.size() + cell];
    }
  }
}

Routes::Routes(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
               std::span<const std::int64_t> widths, std::size_t num_batches, std::size_t num_servers) {
  if (num_servers == 0 || num_servers > kMostServers)
    throw std::invalid_argument("servers must be from 1 to " + std::to_string(kMostServers) + ", got " +
                                std::to_string(num_servers));
  ids_ = ids.size();
  floats_ = fused_offsets(widths, sizes, num_batches, ids.size()).floats.back();
  cells_.reserve(sizes.size());
  for (std::size_t cell = 0; cell < sizes.size(); ++cell)
    cells_.push_back(
        {static_cast<std::size_t>(sizes[cell]), static_cast<std::size_t>(widths[cell % widths.size()])});
  sizes_.assign(num_servers * cells_.size(), 0);
  if (num_servers == 1) {
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  } else if (std::has_single_bit(num_servers)) {
    assign(ids, [mask = num_servers - 1](std::uint64_t id) { return id & mask; });
  } else {
    assign(ids, Remainder(static_cast<std::uint32_t>(num_servers)));
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
  check("numbers", ids_, numbers.size());
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

std::vector<std::size_t> Routes::request_bytes(std::size_t numbers, std::size_t rows) const {
  std::vector<std::size_t> found;
  found.reserve(num_servers());
  for (std::size_t server = 0; server < num_servers(); ++server)
    found.push_back((num_cells() + numbers * static_cast<std::size_t>(num_ids_[server])) *
                        sizeof(std::int64_t) +
                    rows * static_cast<std::size_t>(num_floats_[server]) * sizeof(float));
  return found;
}

void Routes::write_requests(std::span<const std::span<const std::int64_t>> numbers,
                            std::span<const std::span<const float>> rows,
                            std::span<const std::span<std::byte>> to) const {
  const std::vector<std::size_t> bytes = request_bytes(numbers.size(), rows.size());
  check("one buffer for each server", bytes.size(), to.size());
  for (std::size_t server = 0; server < to.size(); ++server) {
    check("bytes of a request", bytes[server], to[server].size());
    if (reinterpret_cast<std::uintptr_t>(to[server].data()) % sizeof(std::int64_t) != 0)
      throw std::invalid_argument("a request must begin at a multiple of 8 bytes");
  }
  for (const auto& column : numbers) check("numbers", ids_, column.size());
  for (const auto& column : rows) check("floats", static_cast<std::size_t>(floats_), column.size());

  std::vector<std::byte*> next;
  for (std::size_t server = 0; server < to.size(); ++server) {
    next.push_back(to[server].data());
    const auto cells = take<std::int64_t>(next[server], num_cells());
    std::copy_n(sizes_.begin() + static_cast<std::ptrdiff_t>(server * num_cells()), num_cells(),
                cells.begin());
  }
  std::vector<std::span<std::int64_t>> number_parts(to.size());
  for (const auto& column : numbers) {
    for (std::size_t server = 0; server < to.size(); ++server)
      number_parts[server] = take<std::int64_t>(next[server], static_cast<std::size_t>(num_ids_[server]));
    spread_numbers(column, number_parts);
  }
  std::vector<std::span<float>> row_parts(to.size());
  for (const auto& column : rows) {
    for (std::size_t server = 0; server < to.size(); ++server)
      row_parts[server] = take<float>(next[server], static_cast<std::size_t>(num_floats_[server]));
    spread_rows(column, row_parts);
  }
}

}  // namespace monolith
