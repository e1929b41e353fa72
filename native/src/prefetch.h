// Asking for memory before it is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monolith {

inline constexpr std::size_t kLine = 64;  // bytes
// How many rows before its turn a row is asked for. A core has some twenty lines under way at once; to ask
// for more only makes it wait.
inline constexpr std::size_t kRowsAhead = 8;

// Asks for all lines that some bytes lie on: kWrite 1 to change them, 0 to read them.
template <int kWrite>
inline __attribute__((always_inline)) void prefetch(const void* data, std::size_t bytes) {
  asm volatile("");  // or a function that does nothing but prefetch passes for one that does nothing
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  std::uintptr_t line = first & ~(kLine - 1);
  do {
    __builtin_prefetch(reinterpret_cast<const void*>(line), kWrite);
    line += kLine;
  } while (line < first + bytes);
}

// The same for kBytes that begin on a line and end on one.
template <int kWrite, std::size_t kBytes>
inline __attribute__((always_inline)) void prefetch_lines(const void* data) {
  asm volatile("" ::: "memory");  // where it stands it stays
#pragma GCC unroll 16
  for (std::size_t line = 0; line < kBytes; line += kLine)
    __builtin_prefetch(static_cast<const std::byte*>(data) + line, kWrite);
}

}  // namespace monolith
