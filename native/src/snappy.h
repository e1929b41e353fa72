// Snappy blocks, read only: what the original system's multi-table dumps and some TensorFlow files use.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace monolith {

// Decompresses one block into `out`, whatever it held. Returns why the block is not valid; empty on success.
//
// The block is not trusted. Its first bytes promise a length; no element of a block can write more than
// 64 bytes from two of its own, so a promise beyond 32 times the block is refused before memory is set aside.
std::string snappy_decode(std::span<const std::byte> block, std::vector<std::byte>& out);

}  // namespace monolith
