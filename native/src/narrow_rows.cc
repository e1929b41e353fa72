#include "narrow_rows.h"

#include <algorithm>
#include <cstring>

#include "narrow.h"
#include "prefetch.h"

namespace monolith {
namespace {

using Code = std::uint16_t __attribute__((may_alias));
using Float = float __attribute__((may_alias));

constexpr std::size_t first_scale(std::size_t dim) {
  return (dim + sizeof(float) - 1) / sizeof(float) * sizeof(float);
}

// Codings. `dim` is that of the row, and a constant where it is known when this is compiled. kChance says how
// values are rounded: by `key`, or to the nearest.

struct Bfloat16 {
  static MONOLITH_INLINE float value(Code code) { return bfloat16_value(code); }
  static MONOLITH_INLINE u32 nearest(float x) { return nearest_bfloat16(x); }
  static MONOLITH_INLINE u32 chance(float x, u64 key, int i) { return stochastic_bfloat16(x, key, i); }
};

struct Float16 {
  static MONOLITH_INLINE float value(Code code) { return float_of(code); }
  static MONOLITH_INLINE u32 nearest(float x) { return nearest_float16(x); }
  static MONOLITH_INLINE u32 chance(float x, u64 key, int i) { return stochastic_float16(x, key, i); }
};

// Values of two bytes, each on its own.
template <class Coding>
struct Halves {
  static MONOLITH_INLINE void widen(const NarrowRow&, int dim, const std::byte* from, float* __restrict__ to,
                                    std::size_t rows) {
    const auto* codes = reinterpret_cast<const Code*>(from);
#pragma GCC unroll 1
    for (std::size_t i = 0; i < rows * dim; ++i) to[i] = Coding::value(codes[i]);
  }

  template <bool kChance>
  static MONOLITH_INLINE void round(const NarrowRow&, int dim, const float* from, std::byte* __restrict__ to,
                                    u64 key) {
    auto* codes = reinterpret_cast<Code*>(to);
#pragma GCC unroll 1
    for (int i = 0; i < dim; ++i)
      codes[i] = static_cast<Code>(kChance ? Coding::chance(from[i], key, i) : Coding::nearest(from[i]));
  }
};

// Calls each(column) for columns up to `end`, by blocks that become vector code whatever the width is. Here
// and below, "unroll 1" keeps g++ from unrolling short loops before it looks for vectors, of which it then
// finds none.
template <class Each>
MONOLITH_INLINE inline void each_column(int column, int end, const Each& each) {
  for (; column + 16 <= end; column += 16)
#pragma GCC unroll 1
    for (int i = column; i < column + 16; ++i) each(i);
  for (; column + 8 <= end; column += 8)
#pragma GCC unroll 1
    for (int i = column; i < column + 8; ++i) each(i);
  for (; column < end; ++column) each(column);
}

struct Int8 {
  static constexpr int kAtOnce = 64;

  // Calls each(segment, first column, width). The usual rows, a vector and a bias with a vector, have widths
  // that are constants where that of the row is.
  template <class Each>
  static MONOLITH_INLINE void segments(const NarrowRow& row, int dim, const Each& each) {
    if (row.widths.size() == 1) return each(0, 0, dim);
    if (row.widths.size() == 2 && row.widths[0] == 1) {
      each(0, 0, 1);
      return each(1, 1, dim - 1);
    }
    int column = 0;
    for (std::size_t s = 0; s < row.widths.size(); column += row.widths[s++])
      each(static_cast<int>(s), column, row.widths[s]);
  }

  static MONOLITH_INLINE void widen(const NarrowRow& row, int dim, const std::byte* from,
                                    float* __restrict__ to, std::size_t rows) {
    const std::size_t scales_at = first_scale(dim);
    const std::size_t bytes = scales_at + row.widths.size() * sizeof(float);
    for (std::size_t r = 0; r < rows; ++r, from += bytes, to += dim) {
      const auto* codes = reinterpret_cast<const signed char*>(from);
      const auto* scales = reinterpret_cast<const Float*>(from + scales_at);
      segments(row, dim, [&](int s, int column, int width) MONOLITH_INLINE {
        const float scale = scales[s];
        each_column(column, column + width,
                    [&](int i) MONOLITH_INLINE { to[i] = static_cast<float>(codes[i]) * scale; });
      });
    }
  }

  template <bool kChance>
  static MONOLITH_INLINE void round(const NarrowRow& row, int dim, const float* from,
                                    std::byte* __restrict__ to, u64 key) {
    auto* scales = reinterpret_cast<Float*>(to + first_scale(dim));
    segments(row, dim, [&](int s, int column, int width) MONOLITH_INLINE {
      u32 largest = 0;
#pragma GCC unroll 1
      for (int i = column; i < column + width; ++i)
        largest = std::max(largest, bits_of(from[i]) & 0x7fffffff);
      const u32 share = int8_share(largest);
      // Columns count from 0, so that the chance of a scale is none of theirs.
      const float scale = int8_scale(
          share, kChance ? by_chance(share, key, -1 - s, kScaleCut) : to_nearest(share, kScaleCut));
      const float inverse = int8_inverse(largest, scale);
      scales[s] = scale;
      u32 wide[kAtOnce];  // the arithmetic by itself, since a vector has more bytes than floats
      for (int first = column; first < column + width; first += kAtOnce) {
        const int count = std::min(kAtOnce, column + width - first);
#pragma GCC unroll 1
        for (int i = 0; i < count; ++i) {
          const float x = from[first + i];
          const u32 raised = int8_raised(x, inverse);
          wide[i] = int8_code(raised, kChance ? by_chance(bits_of(x), key, first + i, kCodeCut)
                                              : to_nearest(raised, kCodeCut));
        }
        each_column(0, count,
                    [&](int i) MONOLITH_INLINE { to[first + i] = static_cast<std::byte>(wide[i]); });
      }
    });
  }
};

// kDim is the width if it is one of the usual ones, so that loops unroll without a remainder, or 0. Only the
// step itself is behind a call: there are many rules, and few of these loops.
template <class Coding, int kDim>
MONOLITH_INLINE inline void step_all(const NarrowStep& by, std::byte* const* rows,
                                     const std::uint64_t* hashes, const float* const* gradients,
                                     std::size_t count, float* scratch) {
  const int dim = kDim != 0 ? kDim : by.row.dim;
  const auto fetch = [&](std::size_t i) MONOLITH_INLINE {
    prefetch<1>(rows[i], by.row_bytes);
    prefetch<0>(gradients[i], dim * sizeof(float));
  };
  for (std::size_t i = 0; i < std::min(count, kRowsAhead); ++i) fetch(i);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) fetch(i + kRowsAhead);
    std::byte* const row = rows[i];
    Coding::widen(by.row, dim, row, scratch, 1);
    by.kernel(by.spec, scratch, reinterpret_cast<float*>(row + by.state_byte), gradients[i], dim, by.rate,
              by.step);
    if (by.by_chance)
      Coding::template round<true>(by.row, dim, scratch, row,
                                   rounding_key(hashes[i], by.mixed_seed, by.step));
    else
      Coding::template round<false>(by.row, dim, scratch, row, 0);
  }
}

// One set of loops for one kind of processor. All they call is inlined, so that it is compiled for that kind,
// too; they are plain enough that g++ makes vector code of them.
#define MONOLITH_LEVEL(Level, attribute)                                                                     \
  template <class Coding>                                                                                    \
  struct Level {                                                                                             \
    template <int kDim>                                                                                      \
    attribute static void widen(const NarrowRow& row, const std::byte* from, float* to, std::size_t count) { \
      Coding::widen(row, kDim != 0 ? kDim : row.dim, from, to, count);                                       \
    }                                                                                                        \
    attribute static void nearest(const NarrowRow& row, const float* from, std::byte* to) {                  \
      Coding::template round<false>(row, row.dim, from, to, 0);                                              \
    }                                                                                                        \
    attribute static void chance(const NarrowRow& row, const float* from, std::byte* to,                     \
                                 std::uint64_t key) {                                                        \
      Coding::template round<true>(row, row.dim, from, to, key);                                             \
    }                                                                                                        \
    template <int kDim>                                                                                      \
    attribute static void step(const NarrowStep& by, std::byte* const* rows, const std::uint64_t* hashes,    \
                               const float* const* gradients, std::size_t count, float* scratch) {           \
      step_all<Coding, kDim>(by, rows, hashes, gradients, count, scratch);                                   \
    }                                                                                                        \
  };

MONOLITH_LEVEL(Baseline, )
#if defined(__x86_64__)
MONOLITH_LEVEL(Avx2, __attribute__((target("avx2"))))
MONOLITH_LEVEL(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

template <class Level>
NarrowKernels of_level(int dim) {
  const auto with = [](auto known) {
    constexpr int kDim = decltype(known)::value;
    return NarrowKernels{Level::template widen<kDim>, Level::nearest, Level::chance,
                         Level::template step<kDim>};
  };
  switch (dim) {
    case 8:
      return with(std::integral_constant<int, 8>{});
    case 16:
      return with(std::integral_constant<int, 16>{});
    case 17:  // a bias and a vector, trained by one rule
      return with(std::integral_constant<int, 17>{});
    case 32:
      return with(std::integral_constant<int, 32>{});
    case 64:
      return with(std::integral_constant<int, 64>{});
    case 128:
      return with(std::integral_constant<int, 128>{});
    default:
      return with(std::integral_constant<int, 0>{});
  }
}

template <class Coding>
NarrowKernels of_coding(int dim, [[maybe_unused]] SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return of_level<Avx512<Coding>>(dim);
  if (level == SimdLevel::kAvx2) return of_level<Avx2<Coding>>(dim);
#endif
  return of_level<Baseline<Coding>>(dim);
}

}  // namespace

std::size_t narrow_bytes(ValueCoding coding, const NarrowRow& row) {
  if (coding == ValueCoding::kInt8) return first_scale(row.dim) + row.widths.size() * sizeof(float);
  return row.dim * sizeof(Code);
}

NarrowKernels narrow_kernels(ValueCoding coding, int dim, SimdLevel level) {
  switch (coding) {
    case ValueCoding::kFloat16:
      return of_coding<Halves<Float16>>(dim, level);
    case ValueCoding::kInt8:
      return of_coding<Int8>(dim, level);
    default:
      return of_coding<Halves<Bfloat16>>(dim, level);
  }
}

}  // namespace monolith
