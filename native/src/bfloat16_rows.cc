#include "bfloat16_rows.h"

#include <algorithm>

#include "bfloat16.h"
#include "prefetch.h"

namespace monolith {
namespace {

using Code = std::uint16_t __attribute__((may_alias));

MONOLITH_INLINE inline void widen_all(const std::byte* from, float* __restrict__ to, std::size_t count) {
  const auto* codes = reinterpret_cast<const Code*>(from);
  for (std::size_t i = 0; i < count; ++i) to[i] = bfloat16_value(codes[i]);
}

MONOLITH_INLINE inline void nearest_all(const float* from, std::byte* __restrict__ to, std::size_t count) {
  auto* codes = reinterpret_cast<Code*>(to);
  for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<Code>(nearest_bfloat16(from[i]));
}

MONOLITH_INLINE inline void chance_all(const float* from, std::byte* __restrict__ to, std::size_t count,
                                       std::uint64_t key) {
  auto* codes = reinterpret_cast<Code*>(to);
  for (std::size_t i = 0; i < count; ++i)
    codes[i] = static_cast<Code>(stochastic_bfloat16(from[i], key, static_cast<int>(i)));
}

// kDim is the width if it is one of the usual ones, so that loops unroll without a remainder, or 0. Only the
// step itself is behind a call: there are many rules, and few of these loops.
template <int kDim>
MONOLITH_INLINE inline void step_all(const Bfloat16Step& by, std::byte* const* rows,
                                     const std::uint64_t* hashes, const float* const* gradients,
                                     std::size_t count, float* scratch) {
  const int dim = kDim != 0 ? kDim : by.dim;
  const auto fetch = [&](std::size_t i) MONOLITH_INLINE {
    prefetch<1>(rows[i], by.row_bytes);
    prefetch<0>(gradients[i], dim * sizeof(float));
  };
  for (std::size_t i = 0; i < std::min(count, kRowsAhead); ++i) fetch(i);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) fetch(i + kRowsAhead);
    std::byte* const row = rows[i];
    widen_all(row, scratch, dim);
    by.kernel(by.spec, scratch, reinterpret_cast<float*>(row + by.state_byte), gradients[i], dim, by.rate,
              by.step);
    if (by.by_chance)
      chance_all(scratch, row, dim, rounding_key(hashes[i], by.mixed_seed, by.step));
    else
      nearest_all(scratch, row, dim);
  }
}

// One set of loops for one kind of processor. All they call is inlined, so that it is compiled for that kind,
// too; they are plain enough that g++ makes vector code of them.
#define MONOLITH_LEVEL(Level, attribute)                                                                    \
  struct Level {                                                                                            \
    attribute static void widen(const std::byte* from, float* to, std::size_t count) {                      \
      widen_all(from, to, count);                                                                           \
    }                                                                                                       \
    attribute static void nearest(const float* from, std::byte* to, std::size_t count) {                    \
      nearest_all(from, to, count);                                                                         \
    }                                                                                                       \
    attribute static void chance(const float* from, std::byte* to, std::size_t count, std::uint64_t key) {  \
      chance_all(from, to, count, key);                                                                     \
    }                                                                                                       \
    template <int kDim>                                                                                     \
    attribute static void step(const Bfloat16Step& by, std::byte* const* rows, const std::uint64_t* hashes, \
                               const float* const* gradients, std::size_t count, float* scratch) {          \
      step_all<kDim>(by, rows, hashes, gradients, count, scratch);                                          \
    }                                                                                                       \
  };

MONOLITH_LEVEL(Baseline, )
#if defined(__x86_64__)
MONOLITH_LEVEL(Avx2, __attribute__((target("avx2"))))
MONOLITH_LEVEL(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

template <class Level>
Bfloat16Kernels of_level(int dim) {
  const auto with = [](auto step) {
    return Bfloat16Kernels{Level::widen, Level::nearest, Level::chance, step};
  };
  switch (dim) {
    case 8:
      return with(Level::template step<8>);
    case 16:
      return with(Level::template step<16>);
    case 17:  // a bias and a vector, trained by one rule
      return with(Level::template step<17>);
    case 32:
      return with(Level::template step<32>);
    case 64:
      return with(Level::template step<64>);
    case 128:
      return with(Level::template step<128>);
    default:
      return with(Level::template step<0>);
  }
}

}  // namespace

Bfloat16Kernels bfloat16_kernels(int dim, [[maybe_unused]] SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return of_level<Avx512>(dim);
  if (level == SimdLevel::kAvx2) return of_level<Avx2>(dim);
#endif
  return of_level<Baseline>(dim);
}

}  // namespace monolith
