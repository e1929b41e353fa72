#include "optimizers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "prefetch.h"

namespace monolith {
namespace {

// As many floats as a register of the processor holds, at any address.
template <int kFloats>
struct Wide;
template <>
struct Wide<1> {
  using Type = float;
};
template <>
struct Wide<2> {
  using Type = float __attribute__((vector_size(8), aligned(4), may_alias));
};
template <>
struct Wide<4> {
  using Type = float __attribute__((vector_size(16), aligned(4), may_alias));
};
template <>
struct Wide<8> {
  using Type = float __attribute__((vector_size(32), aligned(4), may_alias));
};
template <>
struct Wide<16> {
  using Type = float __attribute__((vector_size(64), aligned(4), may_alias));
};

// A segment in host memory, as rules see it. kDim is the width when it is one of the usual ones, so that
// loops unroll without a remainder, or 0 to read it from `dim`. kFloats is the width of a register.
template <class Rule, int kDim, int kFloats>
struct HostValues {
  float* w;
  float* state;
  const float* g;
  int dim;

  MONOLITH_INLINE int d() const { return kDim != 0 ? kDim : dim; }
  MONOLITH_INLINE int count() const { return d(); }
  MONOLITH_INLINE float* scalars() const { return state + Rule::kVectors * d(); }

  template <class F>
  MONOLITH_INLINE void each(F f) const {
    loop<kFloats>(0, f);
  }

  template <class F>
  MONOLITH_INLINE float sum(F f) const {
    float all = 0;
    each([&all, f](auto& x, auto gradient, auto&... more) MONOLITH_INLINE {
      const auto some = f(x, gradient, more...);
      if constexpr (is_vector<decltype(some)>)
        for (std::size_t i = 0; i < sizeof(some) / sizeof(float); ++i) all += some[i];
      else
        all += some;
    });
    return all;
  }

  template <class F>
  MONOLITH_INLINE float largest(F f) const {
    float most = 0;
    each([&most, f](auto& x, auto gradient, auto&... more) MONOLITH_INLINE {
      const auto some = f(x, gradient, more...);
      if constexpr (is_vector<decltype(some)>)
        for (std::size_t i = 0; i < sizeof(some) / sizeof(float); ++i) most = std::max(most, float(some[i]));
      else
        most = std::max(most, some);
    });
    return most;
  }

 private:
  // Vectors of kWide values from number i on, then narrower ones, then the last values one by one.
  template <int kWide, class F>
  MONOLITH_INLINE void loop(int i, F f) const {
    for (; i + kWide <= d(); i += kWide) at<typename Wide<kWide>::Type>(i, f);
    if constexpr (kWide > 1) loop<kWide / 2 >= 4 ? kWide / 2 : 1>(i, f);
  }
  // All are read before any is written, so that the compiler need not ask whether they overlap.
  template <class Floats, class F>
  MONOLITH_INLINE void at(int i, F f) const {
    Floats* const weights = reinterpret_cast<Floats*>(w + i);
    Floats* const s0 = reinterpret_cast<Floats*>(state + i);
    Floats* const s1 = reinterpret_cast<Floats*>(state + d() + i);
    Floats* const s2 = reinterpret_cast<Floats*>(state + 2 * d() + i);
    Floats weight = *weights;
    const Floats gradient = *reinterpret_cast<const Floats*>(g + i);
    if constexpr (Rule::kVectors == 0) {
      f(weight, gradient);
    } else {
      Floats a = *s0;
      if constexpr (Rule::kVectors == 1) {
        f(weight, gradient, a);
      } else {
        Floats b = *s1;
        if constexpr (Rule::kVectors == 2) {
          f(weight, gradient, a, b);
        } else {
          Floats c = *s2;
          f(weight, gradient, a, b, c);
          *s2 = c;
        }
        *s1 = b;
      }
      *s0 = a;
    }
    *weights = weight;
  }
};

template <class Rule>
concept InDouble = requires { Rule::kInDouble; };

// A rule as a kernel.
template <class Rule, int kFloats>
struct Kernel {
  template <int kDim>
  MONOLITH_INLINE static inline void step(const OptimizerSpec& spec, float* w, float* state, const float* g,
                                          int dim, float rate, std::int64_t step) {
    HostValues<Rule, kDim, InDouble<Rule> ? kFloats / 2 : kFloats> values{w, state, g, dim};
    Rule::step(spec, values, rate, step);
  }
};

// Some values: `kMany` times `kFloats` of them. `meanwhile` is called between reading and the arithmetic,
// where a prefetch that waits holds up least. Left to itself the compiler goes float by float, as the code
// around it happens to be.
template <int kFloats, int kMany, bool kDecay, class Meanwhile>
MONOLITH_INLINE inline void adagrad_some(float* w, float* state, const float* g, float rate, float decay,
                                         Meanwhile meanwhile) {
  using Floats = typename Wide<kFloats>::Type;
  auto* const weights = reinterpret_cast<Floats*>(w);
  auto* const sums = reinterpret_cast<Floats*>(state);
  Floats weight[kMany];
  Floats sum[kMany];
  Floats grad[kMany];
#pragma GCC unroll 4
  for (int i = 0; i < kMany; ++i) {
    weight[i] = weights[i];
    sum[i] = sums[i];
    grad[i] = reinterpret_cast<const Floats*>(g)[i];
  }
  meanwhile();
#pragma GCC unroll 4
  for (int i = 0; i < kMany; ++i) {
    rules::Adagrad::value<kDecay>(weight[i], sum[i], grad[i], rate, decay);
    sums[i] = sum[i];
    weights[i] = weight[i];
  }
}

// Adagrad is the optimizer that nearly all tables have, so its loop is written out.
template <bool kDecay, int kFloats>
struct AdagradKernel {
  static constexpr bool kTakesMeanwhile = true;
  template <int kDim, class Meanwhile>
  MONOLITH_INLINE static inline void step_while(const OptimizerSpec& spec, float* w, float* state,
                                                const float* g, int dim, float rate, Meanwhile meanwhile) {
    const int d = kDim != 0 ? kDim : dim;
    const auto nothing = [] {};
    const float decay = kDecay ? spec.weight_decay : 0;
    constexpr int kBlock = 4 * kFloats;
    int i = 0;
    if (d >= kBlock) {
      adagrad_some<kFloats, 4, kDecay>(w, state, g, rate, decay, meanwhile);
      for (i = kBlock; i + kBlock <= d; i += kBlock)
        adagrad_some<kFloats, 4, kDecay>(w + i, state + i, g + i, rate, decay, nothing);
    } else {
      meanwhile();
    }
    for (; i + kFloats <= d; i += kFloats)
      adagrad_some<kFloats, 1, kDecay>(w + i, state + i, g + i, rate, decay, nothing);
    if constexpr (kFloats > 4)
      for (; i + 4 <= d; i += 4) adagrad_some<4, 1, kDecay>(w + i, state + i, g + i, rate, decay, nothing);
    for (; i < d; ++i) adagrad_some<1, 1, kDecay>(w + i, state + i, g + i, rate, decay, nothing);
  }
};

template <int kFloats>
struct Kernel<rules::Adagrad, kFloats> {
  using WithDecay = AdagradKernel<true, kFloats>;
  using WithoutDecay = AdagradKernel<false, kFloats>;

  template <int kDim>
  MONOLITH_INLINE static inline void step(const OptimizerSpec& spec, float* w, float* state, const float* g,
                                          int dim, float rate, std::int64_t) {
    if (spec.weight_decay != 0)
      WithDecay::template step_while<kDim>(spec, w, state, g, dim, rate, [] {});
    else
      WithoutDecay::template step_while<kDim>(spec, w, state, g, dim, rate, [] {});
  }
};

template <class Kernel>
concept TakesMeanwhile = requires { Kernel::kTakesMeanwhile; };
template <class Kernel>
concept DecaysOrNot = requires { typename Kernel::WithDecay; };

// The kernel is in the loop itself, not behind a call: a processor that waits for the address of a
// prefetch continues with the 128 instructions that follow, and those should be the next rows'. A step on a
// usual row takes some 60, so that there are two of them under way; each instruction more is felt.
template <class Kernel, int kDim, class Fetch>
inline __attribute__((always_inline)) void take_all(const OptimizerSpec& spec, std::byte* const* rows,
                                                    const float* const* gradients, std::size_t count, int d,
                                                    float rate, std::int64_t step, Fetch fetch) {
  const auto take = [&](std::size_t i, auto meanwhile) __attribute__((always_inline)) {
    auto* const row = reinterpret_cast<float*>(rows[i]);
    if constexpr (TakesMeanwhile<Kernel>) {
      Kernel::template step_while<kDim>(spec, row, row + d, gradients[i], d, rate, meanwhile);
    } else {
      meanwhile();
      Kernel::template step<kDim>(spec, row, row + d, gradients[i], d, rate, step);
    }
  };
  const std::size_t last = count - std::min(count, kRowsAhead);
  for (std::size_t i = 0; i < count - last; ++i) fetch(i);
  for (std::size_t i = 0; i < last; ++i) take(i, [&] { fetch(i + kRowsAhead); });
  for (std::size_t i = last; i < count; ++i) take(i, [] {});
}

template <class Kernel, int kDim>
MONOLITH_INLINE inline void steps(const OptimizerSpec& spec, std::byte* const* rows, std::size_t row_bytes,
                                  const float* const* gradients, std::size_t count, int dim, float rate,
                                  std::int64_t step) {
  const int d = kDim != 0 ? kDim : dim;
  if constexpr (DecaysOrNot<Kernel>) {
    if (spec.weight_decay != 0)
      steps<typename Kernel::WithDecay, kDim>(spec, rows, row_bytes, gradients, count, dim, rate, step);
    else
      steps<typename Kernel::WithoutDecay, kDim>(spec, rows, row_bytes, gradients, count, dim, rate, step);
    return;
  }
  constexpr std::size_t kBytes = kDim * sizeof(float);
  if constexpr (TakesMeanwhile<Kernel> && kBytes != 0 && kBytes % kLine == 0) {
    if (row_bytes == 2 * kBytes) {  // the row of a single segment, values and state
      const auto fetch = [=](std::size_t i) __attribute__((always_inline)) {
        prefetch_lines<1, 2 * kBytes>(rows[i]);
        prefetch_lines<0, kBytes>(gradients[i]);
      };
      if (reinterpret_cast<std::uintptr_t>(gradients[0]) % kLine == 0)
        take_all<Kernel, kDim>(spec, rows, gradients, count, d, rate, step, fetch);
      else  // they end on a line more
        take_all<Kernel, kDim>(spec, rows, gradients, count, d, rate, step, [=](std::size_t i) {
          fetch(i);
          __builtin_prefetch(reinterpret_cast<const std::byte*>(gradients[i]) + kBytes - 1);
        });
      return;
    }
  }
  take_all<Kernel, kDim>(spec, rows, gradients, count, d, rate, step, [=](std::size_t i) {
    prefetch<1>(rows[i], row_bytes);
    prefetch<0>(gradients[i], d * sizeof(float));
  });
}

// Sums of `of` each float, in lanes that the compiler adds up side by side. NaN and infinity survive them.
template <class Of, class All>
MONOLITH_INLINE inline bool lanes_are(const float* values, std::size_t count, Of of, All all) {
  constexpr std::size_t kLanes = 16;
  float sums[kLanes] = {};
  const std::size_t whole = count / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += of(values[i + lane]);
  for (std::size_t i = whole; i < count; ++i) sums[i - whole] += of(values[i]);
  bool fine = true;
  for (const float sum : sums) fine &= all(sum);
  return fine;
}

MONOLITH_INLINE inline bool all_usable(const float* gradients, std::size_t count) {
  const auto small = [](float x) MONOLITH_INLINE { return x <= kMaxGradient; };
  // What is small in sum is small.
  if (lanes_are(gradients, count, [](float x) MONOLITH_INLINE { return magnitude_of(x); }, small))
    return true;
  for (std::size_t i = 0; i < count; ++i)
    if (!small(magnitude_of(gradients[i]))) return false;
  return true;
}

MONOLITH_INLINE inline bool all_finite(const float* values, std::size_t count) {
  return lanes_are(
      values, count, [](float x) MONOLITH_INLINE { return x - x; },
      [](float x) MONOLITH_INLINE { return x == 0; });
}

// Kernels for one kind of processor. All they call is inlined into them, so that it is compiled for that
// kind, too; none of it may fuse a product with a sum, which AVX-512 could.
#define MONOLITH_LEVEL(Level, floats, attribute)                                                          \
  struct Level {                                                                                          \
    static constexpr int kFloats = floats;                                                                \
    template <class Kernel, int kDim>                                                                     \
    attribute static void one(const OptimizerSpec& spec, float* w, float* state, const float* g, int dim, \
                              float rate, std::int64_t step) {                                            \
      Kernel::template step<kDim>(spec, w, state, g, dim, rate, step);                                    \
    }                                                                                                     \
    template <class Kernel, int kDim>                                                                     \
    attribute static void many(const OptimizerSpec& spec, std::byte* const* rows, std::size_t row_bytes,  \
                               const float* const* gradients, std::size_t count, int dim, float rate,     \
                               std::int64_t step) {                                                       \
      steps<Kernel, kDim>(spec, rows, row_bytes, gradients, count, dim, rate, step);                      \
    }                                                                                                     \
    attribute static bool usable(const float* gradients, std::size_t count) {                             \
      return all_usable(gradients, count);                                                                \
    }                                                                                                     \
    attribute static bool finite(const float* values, std::size_t count) {                                \
      return all_finite(values, count);                                                                   \
    }                                                                                                     \
  };

MONOLITH_LEVEL(Baseline, 4, )
#if defined(__x86_64__)
MONOLITH_LEVEL(Avx2, 8, __attribute__((target("avx2"))))
MONOLITH_LEVEL(Avx512, 16, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

template <class Level, class Rule, int kDim>
constexpr StepKernels kernels() {
  using Own = Kernel<Rule, Level::kFloats>;
  return {Level::template one<Own, kDim>, Level::template many<Own, kDim>};
}

template <class Level, class Rule>
StepKernels of_width(int dim) {
  switch (dim) {
    case 1:
      return kernels<Level, Rule, 1>();
    case 4:
      return kernels<Level, Rule, 4>();
    case 8:
      return kernels<Level, Rule, 8>();
    case 16:
      return kernels<Level, Rule, 16>();
    case 17:  // a bias and a vector, trained by one rule
      return kernels<Level, Rule, 17>();
    case 32:
      return kernels<Level, Rule, 32>();
    case 64:
      return kernels<Level, Rule, 64>();
    case 128:
      return kernels<Level, Rule, 128>();
    default:
      return kernels<Level, Rule, 0>();
  }
}

template <class Level>
StepKernels of_level(OptimizerKind kind, int dim) {
  switch (kind) {
#define MONOLITH_KERNELS(Rule, name) \
  case OptimizerKind::k##Rule:       \
    return of_width<Level, rules::Rule>(dim);
    MONOLITH_OPTIMIZERS(MONOLITH_KERNELS)
#undef MONOLITH_KERNELS
  }
  return {};
}

}  // namespace

SimdLevel best_simd_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return SimdLevel::kAvx512;
  if (__builtin_cpu_supports("avx2")) return SimdLevel::kAvx2;
#endif
  return SimdLevel::kBaseline;
}

StepKernels step_kernels(OptimizerKind kind, int dim, [[maybe_unused]] SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return of_level<Avx512>(kind, dim);
  if (level == SimdLevel::kAvx2) return of_level<Avx2>(kind, dim);
#endif
  return of_level<Baseline>(kind, dim);
}

bool usable(const float* gradients, std::size_t count) {
#if defined(__x86_64__)
  static const SimdLevel level = best_simd_level();
  if (level == SimdLevel::kAvx512) return Avx512::usable(gradients, count);
  if (level == SimdLevel::kAvx2) return Avx2::usable(gradients, count);
#endif
  return Baseline::usable(gradients, count);
}

bool finite(const float* values, std::size_t count) {
#if defined(__x86_64__)
  static const SimdLevel level = best_simd_level();
  if (level == SimdLevel::kAvx512) return Avx512::finite(values, count);
  if (level == SimdLevel::kAvx2) return Avx2::finite(values, count);
#endif
  return Baseline::finite(values, count);
}

void initialize_state(const OptimizerSpec& spec, float* state, int dim) {
  switch (spec.kind) {
#define MONOLITH_START(Rule, name)                                                \
  case OptimizerKind::k##Rule:                                                    \
    for (int i = 0; i < rules::Rule::kVectors * dim + rules::Rule::kScalars; ++i) \
      state[i] = rules::Rule::initial(spec, i, dim);                              \
    break;
    MONOLITH_OPTIMIZERS(MONOLITH_START)
#undef MONOLITH_START
  }
}

}  // namespace monolith
