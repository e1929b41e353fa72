#include "bfloat16_rows.h"

#include "bfloat16.h"

namespace monolith {
namespace {

using Code = std::uint16_t __attribute__((may_alias));

// One set of loops for one kind of processor. They are plain, and short enough that g++ makes vector code of
// them; all they call is inlined, so that it is compiled for that kind, too.
#define MONOLITH_LEVEL(Level, attribute)                                                               \
  struct Level {                                                                                       \
    attribute static void widen(const std::byte* from, float* __restrict__ to, std::size_t count) {    \
      const auto* codes = reinterpret_cast<const Code*>(from);                                         \
      for (std::size_t i = 0; i < count; ++i) to[i] = bfloat16_value(codes[i]);                        \
    }                                                                                                  \
    attribute static void nearest(const float* from, std::byte* __restrict__ to, std::size_t count) {  \
      auto* codes = reinterpret_cast<Code*>(to);                                                       \
      for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<Code>(nearest_bfloat16(from[i])); \
    }                                                                                                  \
    attribute static void chance(const float* from, std::byte* __restrict__ to, std::size_t count,     \
                                 std::uint64_t key) {                                                  \
      auto* codes = reinterpret_cast<Code*>(to);                                                       \
      for (std::size_t i = 0; i < count; ++i)                                                          \
        codes[i] = static_cast<Code>(stochastic_bfloat16(from[i], key, static_cast<int>(i)));          \
    }                                                                                                  \
    static Bfloat16Kernels kernels() { return {widen, nearest, chance}; }                              \
  };

MONOLITH_LEVEL(Baseline, )
#if defined(__x86_64__)
MONOLITH_LEVEL(Avx2, __attribute__((target("avx2"))))
MONOLITH_LEVEL(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

}  // namespace

Bfloat16Kernels bfloat16_kernels([[maybe_unused]] SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return Avx512::kernels();
  if (level == SimdLevel::kAvx2) return Avx2::kernels();
#endif
  return Baseline::kernels();
}

}  // namespace monolith
