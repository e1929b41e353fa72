#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "routes.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

Ids list(std::span<const std::int64_t> span) {
  return {span.begin(), span.end()};
}

// Two batches of two tables of widths 1 and 2, over two servers.
const Ids kIds{4, 5, 6, 7, 8, -1};
const Ids kSizes{2, 1, 1, 2};

void each_server_gets_its_ids_in_order() {
  const Routes routes(kIds, kSizes, Ids{1, 2}, 2, 2);
  CHECK(list(routes.sizes()) == (Ids{1, 1, 0, 1, 1, 0, 1, 1}));
  CHECK(list(routes.num_ids()) == (Ids{3, 3}));
  CHECK(list(routes.num_floats()) == (Ids{5, 4}));
  CHECK_EQUAL(routes.floats(), 9);
  Ids even(3), odd(3);
  routes.spread_numbers(kIds, std::vector<std::span<std::int64_t>>{even, odd});
  CHECK(even == (Ids{4, 6, 8}));
  CHECK(odd == (Ids{5, 7, -1}));  // -1 is 2^64 - 1
}

void rows_go_with_their_ids_and_come_back() {
  const Routes routes(kIds, kSizes, Ids{1, 2}, 2, 2);
  const Floats rows{4, 5, 6, 60, 7, 8, 80, 9, 90};
  Floats even(5), odd(4), back(9);
  routes.spread_rows(rows, std::vector<std::span<float>>{even, odd});
  CHECK(even == (Floats{4, 6, 60, 8, 80}));
  CHECK(odd == (Floats{5, 7, 9, 90}));
  routes.gather_rows(std::vector<std::span<const float>>{even, odd}, back);
  CHECK(back == rows);
}

void a_request_is_sizes_then_numbers_then_rows() {
  const Routes routes(kIds, kSizes, Ids{1, 2}, 2, 2);
  const Ids times{40, 50, 60, 70, 80, 90};
  const Floats rows{4, 5, 6, 60, 7, 8, 80, 9, 90};
  const auto bytes = routes.request_bytes(2, 1);
  CHECK(bytes == (std::vector<std::size_t>{(4 + 2 * 3) * 8 + 5 * 4, (4 + 2 * 3) * 8 + 4 * 4}));
  Ids even(13), odd(12);  // 8-byte words: sizes, ids and times, and 5 or 4 floats
  const auto to = [&](std::span<std::int64_t> words, std::size_t size) {
    return std::as_writable_bytes(words).first(size);
  };
  const std::vector<std::span<const std::int64_t>> numbers{kIds, times};
  const std::vector<std::span<const float>> columns{rows};
  routes.write_requests(numbers, columns,
                        std::vector<std::span<std::byte>>{to(even, bytes[0]), to(odd, bytes[1])});
  CHECK((Ids{even.begin(), even.begin() + 10}) == (Ids{1, 1, 0, 1, 4, 6, 8, 40, 60, 80}));
  CHECK((Ids{odd.begin(), odd.begin() + 10}) == (Ids{1, 0, 1, 1, 5, 7, -1, 50, 70, 90}));
  Floats found(5);
  std::memcpy(found.data(), even.data() + 10, sizeof(float) * 5);
  CHECK(found == (Floats{4, 6, 60, 8, 80}));
  CHECK_THROWS(std::invalid_argument, "bytes of a request",
               routes.write_requests(numbers, columns,
                                     std::vector<std::span<std::byte>>{to(even, bytes[0]), to(odd, 8)}));
  CHECK_THROWS(
      std::invalid_argument, "multiple of 8",
      routes.write_requests({}, {},
                            std::vector<std::span<std::byte>>{
                                to(even, 32), std::as_writable_bytes(std::span(odd)).subspan(4, 32)}));
}

void ids_go_to_the_server_of_their_remainder() {
  std::mt19937_64 random(2);
  Ids ids{0, -1, 1, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()};
  while (ids.size() < 2000) ids.push_back(static_cast<std::int64_t>(random() >> random() % 64));
  for (const std::size_t servers : {2, 3, 5, 7, 12, 64, 255, 1000, 65521, 65535}) {
    const Routes routes(ids, Ids{2000}, Ids{1}, 1, servers);
    Ids expected(servers);
    for (const std::int64_t id : ids) ++expected[static_cast<std::uint64_t>(id) % servers];
    CHECK(list(routes.num_ids()) == expected);
  }
}

void any_call_comes_back_as_it_was() {
  std::mt19937_64 random(1);
  for (std::size_t servers = 1; servers < 6; ++servers) {
    for (int round = 0; round < 50; ++round) {
      const Ids widths{1, 16, 3};
      Ids sizes(6), ids;
      std::int64_t floats = 0;
      for (std::size_t cell = 0; cell < sizes.size(); ++cell) {
        sizes[cell] = static_cast<std::int64_t>(random() % 5);
        floats += sizes[cell] * widths[cell % 3];
        for (std::int64_t one = 0; one < sizes[cell]; ++one)
          ids.push_back(static_cast<std::int64_t>(random()));
      }
      const Routes routes(ids, sizes, widths, 2, servers);
      Floats rows(static_cast<std::size_t>(floats)), back(rows.size());
      for (std::size_t at = 0; at < rows.size(); ++at) rows[at] = static_cast<float>(at);
      std::vector<Floats> sent;
      for (const auto count : routes.num_floats()) sent.emplace_back(static_cast<std::size_t>(count));
      routes.spread_rows(rows, std::vector<std::span<float>>(sent.begin(), sent.end()));
      routes.gather_rows(std::vector<std::span<const float>>(sent.begin(), sent.end()), back);
      CHECK(back == rows);
    }
  }
}

void what_does_not_fit_is_refused() {
  CHECK_THROWS(std::invalid_argument, "servers must be from 1", Routes(kIds, kSizes, Ids{1, 2}, 2, 0));
  CHECK_THROWS(std::invalid_argument, "servers must be from 1", Routes(kIds, kSizes, Ids{1, 2}, 2, 1 << 16));
  CHECK_THROWS(std::invalid_argument, "sizes add up", Routes(kIds, Ids{9, 0, 0, 0}, Ids{1, 2}, 2, 2));
  const Routes routes(kIds, kSizes, Ids{1, 2}, 2, 2);
  Floats even(5), short_(3), rows(9);
  Ids ids(3), few(2);
  CHECK_THROWS(std::invalid_argument, "floats of a server: expected 4, got 3",
               routes.spread_rows(rows, std::vector<std::span<float>>{even, short_}));
  CHECK_THROWS(
      std::invalid_argument, "floats: expected 9, got 5",
      routes.spread_rows(even, std::vector<std::span<float>>{even, std::span<float>(rows).first(4)}));
  CHECK_THROWS(std::invalid_argument, "one array for each server: expected 2, got 1",
               routes.gather_rows(std::vector<std::span<const float>>{even}, rows));
  CHECK_THROWS(std::invalid_argument, "numbers of a server: expected 3, got 2",
               routes.spread_numbers(kIds, std::vector<std::span<std::int64_t>>{ids, few}));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"each server gets its ids in order", each_server_gets_its_ids_in_order},
      {"rows go with their ids and come back", rows_go_with_their_ids_and_come_back},
      {"a request is sizes, then numbers, then rows", a_request_is_sizes_then_numbers_then_rows},
      {"ids go to the server of their remainder", ids_go_to_the_server_of_their_remainder},
      {"any call comes back as it was", any_call_comes_back_as_it_was},
      {"what does not fit is refused", what_does_not_fit_is_refused},
  });
}
