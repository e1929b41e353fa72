#include <chrono>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "check.h"
#include "checksum.h"

namespace {

using namespace monolith;

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::vector<std::byte> noise(std::size_t size) {
  std::mt19937_64 random(7);
  std::vector<std::byte> result(size);
  for (auto& b : result) b = static_cast<std::byte>(random());
  return result;
}

void known_answers() {
  CHECK_EQUAL(crc32c(bytes("")), 0u);
  CHECK_EQUAL(crc32c(bytes("123456789")), 3808858755u);
  CHECK_EQUAL(masked_crc32c(bytes("123456789")), 3347755237u);
  // RFC 3720, B.4: 32 bytes of zeros, of ones, counting up.
  const std::vector<std::byte> none(32, std::byte{0}), all(32, std::byte{0xff});
  std::vector<std::byte> up(32);
  for (int i = 0; i < 32; ++i) up[i] = static_cast<std::byte>(i);
  CHECK_EQUAL(crc32c(none), 0x8a9136aau);
  CHECK_EQUAL(crc32c(all), 0x62a8ab43u);
  CHECK_EQUAL(crc32c(up), 0x46dd794eu);
}

void the_fast_path_agrees_with_the_portable_one_at_every_length_and_offset() {
  const auto data = noise(20000);
  const std::span<const std::byte> all(data);
  for (std::size_t size = 0; size < 200; ++size)
    for (std::size_t offset = 0; offset < 9; ++offset)
      CHECK_EQUAL(crc32c(all.subspan(offset, size)), crc32c_portable(all.subspan(offset, size)));
  for (std::size_t size = 3000; size < 19000; size += 257)
    CHECK_EQUAL(crc32c(all.subspan(size % 11, size)), crc32c_portable(all.subspan(size % 11, size)));
}

void a_seed_joins_two_runs() {
  const auto data = noise(10000);
  const std::span<const std::byte> all(data);
  const auto whole = crc32c(all);
  for (std::size_t cut = 0; cut <= data.size(); cut += 613) {
    CHECK_EQUAL(crc32c(all.subspan(cut), crc32c(all.first(cut))), whole);
    CHECK_EQUAL(crc32c_portable(all.subspan(cut), crc32c_portable(all.first(cut))), whole);
  }
}

void speed() {
  const auto data = noise(1 << 20);
  const auto rate = [&](auto function) {
    double best = 0;
    std::uint32_t crc = 0;
    for (int round = 0; round < 20; ++round) {
      const auto start = std::chrono::steady_clock::now();
      crc = function(std::span<const std::byte>(data), crc);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      best = std::max(best, data.size() / took.count() / 1e9);
    }
    return best;
  };
  std::cout << "  crc32c " << rate(crc32c) << " GB/s, portable " << rate(crc32c_portable) << " GB/s\n";
}

}  // namespace

int main() {
  return monolith::check::run({
      {"known answers", known_answers},
      {"the fast path agrees with the portable one at every length and offset",
       the_fast_path_agrees_with_the_portable_one_at_every_length_and_offset},
      {"a seed joins two runs", a_seed_joins_two_runs},
      {"speed", speed},
  });
}
