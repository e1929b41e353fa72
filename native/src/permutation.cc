#include "permutation.h"

#include <algorithm>
#include <bit>
#include <span>

#include "hash.h"

namespace monolith {
namespace {

struct Hashed {
  std::uint64_t hash;
  std::int64_t number;
};

}  // namespace

std::vector<std::int64_t> permutation(std::size_t count, std::uint64_t state) {
  // Hashes are spread evenly, so their first bits sort them into buckets of a few, and a bucket is in cache
  // while it is sorted.
  const int bits = std::max(static_cast<int>(std::bit_width(count)) - 3, 1);
  const auto hash_of = [&](std::size_t number) { return mix(mix(number ^ state) + state); };
  std::vector<std::size_t> ends((std::size_t{1} << bits) + 1);
  for (std::size_t number = 0; number < count; ++number) ++ends[(hash_of(number) >> (64 - bits)) + 1];
  for (std::size_t bucket = 1; bucket < ends.size(); ++bucket) ends[bucket] += ends[bucket - 1];
  std::vector<Hashed> sorted(count);
  for (std::size_t number = 0; number < count; ++number) {
    const std::uint64_t hash = hash_of(number);
    sorted[ends[hash >> (64 - bits)]++] = {hash, static_cast<std::int64_t>(number)};
  }
  // By now each bucket's entry is its end, which is where the next one begins.
  std::size_t begin = 0;
  for (std::size_t bucket = 0; bucket + 1 < ends.size(); ++bucket) {
    std::ranges::sort(std::span(sorted).subspan(begin, ends[bucket] - begin), {}, &Hashed::hash);
    begin = ends[bucket];
  }
  std::vector<std::int64_t> order(count);
  std::ranges::transform(sorted, order.begin(), &Hashed::number);
  return order;
}

}  // namespace monolith
