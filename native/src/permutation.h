// A random order that a number decides: the same on every machine and for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace monolith {

// The numbers from 0 to count - 1, sorted by a hash of each and of `state`. The hash is a bijection, so none
// are equal.
std::vector<std::int64_t> permutation(std::size_t count, std::uint64_t state);

}  // namespace monolith
