#include "optimizers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "prefetch.h"

namespace monolith {
namespace {

// Kernels are structs with one static template: kDim is the width when it is one of the usual ones,
// so that loops unroll and vectorise without a remainder, or 0 to read it from `dim`.
#define MONOLITH_KERNEL(Name)                                                                              \
  struct Name {                                                                                            \
    template <int kDim>                                                                                    \
    __attribute__((always_inline)) static inline void step(const OptimizerSpec& spec, float* __restrict w, \
                                                           float* __restrict state,                        \
                                                           const float* __restrict g, int dim, float rate, \
                                                           std::int64_t step);                             \
  };                                                                                                       \
  template <int kDim>                                                                                      \
  void Name::step([[maybe_unused]] const OptimizerSpec& spec, [[maybe_unused]] float* __restrict w,        \
                  [[maybe_unused]] float* __restrict state, [[maybe_unused]] const float* __restrict g,    \
                  [[maybe_unused]] int dim, [[maybe_unused]] float rate, [[maybe_unused]] std::int64_t step)

#define MONOLITH_WIDTH const int d = kDim != 0 ? kDim : dim

// Division by an accumulator that may still be empty: nothing accumulated, nothing to do.
inline float over(float numerator, float denominator) {
  return denominator != 0 ? numerator / denominator : 0.0f;
}

// Four floats, at any address.
using Four = float __attribute__((vector_size(16), aligned(4), may_alias));

inline Four over(float numerator, Four denominator) {
  return denominator != 0 ? numerator / denominator : Four{};
}

inline float root(float x) {
  return std::sqrt(x);
}
inline Four root(Four x) {
  return Four{root(x[0]), root(x[1]), root(x[2]), root(x[3])};
}

float norm_of(const float* z, int d) {
  float sum = 0;
  for (int i = 0; i < d; ++i) sum += z[i] * z[i];
  return std::sqrt(sum);
}

MONOLITH_KERNEL(Sgd) {
  MONOLITH_WIDTH;
  for (int i = 0; i < d; ++i) w[i] -= rate * g[i];
}

// Some values: `kMany` times a float or four. `meanwhile` is called between reading and the arithmetic, where
// a prefetch that waits holds up least. Left to itself the compiler asks of every row whether it overlaps the
// gradient, or goes float by float, as the code around it happens to be.
template <class Floats, int kMany, bool kDecay, class Meanwhile>
inline __attribute__((always_inline)) void adagrad_some(float* w, float* state, const float* g, float rate,
                                                        float decay, Meanwhile meanwhile) {
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
    if constexpr (kDecay) grad[i] += decay * weight[i];
    sum[i] += grad[i] * grad[i];
    sums[i] = sum[i];
    weights[i] = weight[i] - over(rate, root(sum[i])) * grad[i];
  }
}

template <bool kDecay>
struct AdagradBy {
  static constexpr bool kTakesMeanwhile = true;
  template <int kDim, class Meanwhile>
  __attribute__((always_inline)) static inline void step_while(const OptimizerSpec& spec, float* w,
                                                               float* state, const float* g, int dim,
                                                               float rate, Meanwhile meanwhile) {
    MONOLITH_WIDTH;
    const auto nothing = [] {};
    const float decay = kDecay ? spec.weight_decay : 0;
    int i = 0;
    if (d >= 16) {
      adagrad_some<Four, 4, kDecay>(w, state, g, rate, decay, meanwhile);
      for (i = 16; i + 16 <= d; i += 16)
        adagrad_some<Four, 4, kDecay>(w + i, state + i, g + i, rate, decay, nothing);
    } else {
      meanwhile();
    }
    for (; i + 4 <= d; i += 4) adagrad_some<Four, 1, kDecay>(w + i, state + i, g + i, rate, decay, nothing);
    for (; i < d; ++i) adagrad_some<float, 1, kDecay>(w + i, state + i, g + i, rate, decay, nothing);
  }
};

MONOLITH_KERNEL(Adagrad) {
  if (spec.weight_decay != 0)
    AdagradBy<true>::step_while<kDim>(spec, w, state, g, dim, rate, [] {});
  else
    AdagradBy<false>::step_while<kDim>(spec, w, state, g, dim, rate, [] {});
}

// Adagrad with the decay beside the adaptive step (decoupled) or inside the gradient (coupled). With lazy
// decay the row first decays by every step since its last, this one included; its counter is then one more
// than the step of its last update, so that 0 is a row that never had one. That is older than a step which
// comes late, or again, and takes nothing more.
MONOLITH_KERNEL(DynamicWdAdagrad) {
  MONOLITH_WIDTH;
  if (spec.lazy_decay) {
    std::int64_t seen;
    std::memcpy(&seen, state + d, sizeof(seen));
    const std::int64_t now = step + 1;
    const float kept = kept_after(rate * spec.weight_decay, seen == 0 ? 1 : now - seen);
    for (int i = 0; i < d; ++i) {
      const float norm = state[i] + g[i] * g[i];
      state[i] = norm;
      w[i] = w[i] * kept - over(rate, std::sqrt(norm)) * g[i];
    }
    seen = std::max(seen, now);
    std::memcpy(state + d, &seen, sizeof(seen));
    return;
  }
  if (!spec.decouple_weight_decay) {
    Adagrad::step<kDim>(spec, w, state, g, dim, rate, step);
  } else {
    const float decay = rate * spec.weight_decay;
    for (int i = 0; i < d; ++i) {
      const float norm = state[i] + g[i] * g[i];
      state[i] = norm;
      w[i] -= over(rate, std::sqrt(norm)) * g[i] + decay * w[i];
    }
  }
  std::memcpy(state + d, &step, sizeof(step));
}

MONOLITH_KERNEL(Adadelta) {
  MONOLITH_WIDTH;
  float* accum = state;
  float* accum_update = state + d;
  for (int i = 0; i < d; ++i) {
    const float grad = g[i] + spec.weight_decay * w[i];
    const float a = spec.rho * accum[i] + (1 - spec.rho) * grad * grad;
    const float u = over(std::sqrt(accum_update[i] + spec.epsilon), std::sqrt(a + spec.epsilon)) * grad;
    w[i] -= rate * u;
    accum_update[i] = spec.rho * accum_update[i] + (1 - spec.rho) * u * u;
    accum[i] = a;
  }
}

MONOLITH_KERNEL(Adam) {
  MONOLITH_WIDTH;
  float* m = state;
  float* v = state + d;
  float* powers = state + 2 * d;
  const float alpha = rate * std::sqrt(1 - powers[1]) / (1 - powers[0]);
  for (int i = 0; i < d; ++i) {
    const float grad = g[i] + spec.weight_decay * w[i];
    m[i] += (grad - m[i]) * (1 - spec.beta1);
    v[i] += (grad * grad - v[i]) * (1 - spec.beta2);
    const float up = spec.use_nesterov ? (1 - spec.beta1) * grad + spec.beta1 * m[i] : m[i];
    w[i] -= over(alpha * up, std::sqrt(v[i]) + spec.epsilon);
  }
  powers[0] *= spec.beta1;
  powers[1] *= spec.beta2;
}

MONOLITH_KERNEL(Amsgrad) {
  MONOLITH_WIDTH;
  float* m = state;
  float* v = state + d;
  float* vhat = state + 2 * d;
  float* powers = state + 3 * d;
  const float alpha = rate * std::sqrt(1 - powers[1]) / (1 - powers[0]);
  for (int i = 0; i < d; ++i) {
    const float grad = g[i] + spec.weight_decay * w[i];
    m[i] += (grad - m[i]) * (1 - spec.beta1);
    v[i] += (grad * grad - v[i]) * (1 - spec.beta2);
    vhat[i] = std::max(vhat[i], v[i]);
    const float up = spec.use_nesterov ? (1 - spec.beta1) * grad + spec.beta1 * m[i] : m[i];
    w[i] -= over(alpha * up, std::sqrt(vhat[i]) + spec.epsilon);
  }
  powers[0] *= spec.beta1;
  powers[1] *= spec.beta2;
}

// Not a gradient at all: a moving estimate of how many steps pass between two sightings of an id.
MONOLITH_KERNEL(BatchSoftmax) {
  std::int64_t last;
  std::memcpy(&last, state, sizeof(last));
  w[0] = (1 - rate) * w[0] + rate * static_cast<float>(step - last);
  std::memcpy(state, &step, sizeof(step));
}

MONOLITH_KERNEL(Ftrl) {
  MONOLITH_WIDTH;
  if (rate == 0) return;
  float* norm = state;
  float* zero = state + d;
  for (int i = 0; i < d; ++i) {
    const float n = norm[i] + g[i] * g[i];
    const float root = std::sqrt(n);
    const float sigma = (root - std::sqrt(norm[i])) / rate;
    const float z = zero[i] + (g[i] - sigma * w[i]);
    const float moved = over(rate * (std::copysign(spec.l1, z) - z), root + spec.beta + spec.l2 * rate);
    norm[i] = n;
    zero[i] = z;
    w[i] = std::abs(z) <= spec.l1 ? 0.0f : moved;
  }
}

MONOLITH_KERNEL(GroupFtrl) {
  MONOLITH_WIDTH;
  if (rate == 0) return;
  float* norm = state;
  float* zero = state + d;
  for (int i = 0; i < d; ++i) {
    const float n = norm[i] + g[i] * g[i];
    const float sigma = (std::sqrt(n) - std::sqrt(norm[i])) / rate;
    zero[i] += g[i] - sigma * w[i];
    norm[i] = n;
  }
  const float length = norm_of(zero, d);
  if (length < spec.l1 || length == 0) {
    std::fill(w, w + d, 0.0f);
    return;
  }
  const float shrink = (spec.l1 - length) / length;
  for (int i = 0; i < d; ++i)
    w[i] = over(rate * zero[i] * shrink, spec.beta + std::sqrt(norm[i]) + spec.l2 * rate);
}

MONOLITH_KERNEL(GroupAdagrad) {
  MONOLITH_WIDTH;
  float largest = 0;
  for (int i = 0; i < d; ++i) {
    const float grad = g[i] + spec.weight_decay * w[i];
    largest = std::max(largest, grad * grad);
  }
  const float sum = state[0] + largest;
  const float pace = rate / (spec.beta + std::sqrt(sum));
  if (!(pace > 0) || !std::isfinite(pace)) {  // a rate of zero, or nothing accumulated and no gradient
    state[0] = sum;
    return;
  }
  float length = 0;
  for (int i = 0; i < d; ++i) {
    const float z = g[i] + spec.weight_decay * w[i] - w[i] / pace;
    length += z * z;
  }
  length = std::sqrt(length);
  state[0] = sum;
  if (length < spec.l2 || length == 0) {
    std::fill(w, w + d, 0.0f);
    return;
  }
  const float shrink = -pace * ((length - spec.l2) / length);
  for (int i = 0; i < d; ++i) w[i] = shrink * (g[i] + spec.weight_decay * w[i] - w[i] / pace);
}

MONOLITH_KERNEL(Momentum) {
  MONOLITH_WIDTH;
  const float mu = spec.momentum;
  for (int i = 0; i < d; ++i) {
    const float dx = rate * (g[i] + spec.weight_decay * w[i]);
    const float n = mu * state[i] - dx;
    w[i] += spec.use_nesterov ? -mu * state[i] + (1 + mu) * n : n;
    state[i] = n;
  }
}

MONOLITH_KERNEL(MovingAverage) {
  MONOLITH_WIDTH;
  for (int i = 0; i < d; ++i) w[i] = spec.momentum * w[i] + (1 - spec.momentum) * g[i];
}

template <bool kAverage>
void rmsprop(const OptimizerSpec& spec, float* __restrict w, float* __restrict state,
             const float* __restrict g, int d, float rate) {
  const double mu = spec.momentum;
  for (int i = 0; i < d; ++i) {
    const double grad = static_cast<double>(g[i]) + static_cast<double>(spec.weight_decay) * w[i];
    const double n = mu * state[i] + (kAverage ? 1 - mu : 1.0) * grad * grad;
    w[i] = static_cast<float>(w[i] - static_cast<double>(rate) / (std::sqrt(n) + 1) * grad);
    state[i] = static_cast<float>(n);
  }
}

MONOLITH_KERNEL(Rmsprop) {
  MONOLITH_WIDTH;
  rmsprop<true>(spec, w, state, g, d, rate);
}

MONOLITH_KERNEL(RmspropV2) {
  MONOLITH_WIDTH;
  rmsprop<false>(spec, w, state, g, d, rate);
}

template <class Kernel>
concept TakesMeanwhile = requires { Kernel::kTakesMeanwhile; };

// The kernel stands in the loop itself, not behind a call: a processor that waits for the address of a
// prefetch goes on with the 128 instructions that follow, and those should be the next rows'. A step on a
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
void steps(const OptimizerSpec& spec, std::byte* const* rows, std::size_t row_bytes,
           const float* const* gradients, std::size_t count, int dim, float rate, std::int64_t step) {
  MONOLITH_WIDTH;
  if constexpr (std::is_same_v<Kernel, Adagrad>) {
    const auto kernel = spec.weight_decay != 0 ? steps<AdagradBy<true>, kDim> : steps<AdagradBy<false>, kDim>;
    kernel(spec, rows, row_bytes, gradients, count, dim, rate, step);
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

template <class Kernel, int kDim>
constexpr StepKernels kernels() {
  return {Kernel::template step<kDim>, steps<Kernel, kDim>};
}

template <class Kernel>
StepKernels of_width(int dim) {
  switch (dim) {
    case 1:
      return kernels<Kernel, 1>();
    case 4:
      return kernels<Kernel, 4>();
    case 8:
      return kernels<Kernel, 8>();
    case 16:
      return kernels<Kernel, 16>();
    case 17:  // a bias and a vector, trained alike
      return kernels<Kernel, 17>();
    case 32:
      return kernels<Kernel, 32>();
    case 64:
      return kernels<Kernel, 64>();
    case 128:
      return kernels<Kernel, 128>();
    default:
      return kernels<Kernel, 0>();
  }
}

}  // namespace

StepKernels step_kernels(OptimizerKind kind, int dim) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return of_width<Sgd>(dim);
    case OptimizerKind::kAdagrad:
      return of_width<Adagrad>(dim);
    case OptimizerKind::kDynamicWdAdagrad:
      return of_width<DynamicWdAdagrad>(dim);
    case OptimizerKind::kAdadelta:
      return of_width<Adadelta>(dim);
    case OptimizerKind::kAdam:
      return of_width<Adam>(dim);
    case OptimizerKind::kAmsgrad:
      return of_width<Amsgrad>(dim);
    case OptimizerKind::kBatchSoftmax:
      return kernels<BatchSoftmax, 1>();
    case OptimizerKind::kFtrl:
      return of_width<Ftrl>(dim);
    case OptimizerKind::kGroupAdagrad:
      return of_width<GroupAdagrad>(dim);
    case OptimizerKind::kGroupFtrl:
      return of_width<GroupFtrl>(dim);
    case OptimizerKind::kMomentum:
      return of_width<Momentum>(dim);
    case OptimizerKind::kMovingAverage:
      return of_width<MovingAverage>(dim);
    case OptimizerKind::kRmsprop:
      return of_width<Rmsprop>(dim);
    case OptimizerKind::kRmspropV2:
      return of_width<RmspropV2>(dim);
  }
  return {};
}

namespace {

// Sums of `of` each float, in lanes that the compiler adds up side by side. NaN and infinity survive them.
template <class Of, class All>
inline bool lanes_are(const float* values, std::size_t count, Of of, All all) {
  constexpr std::size_t kLanes = 16;
  float sums[kLanes] = {};
  const std::size_t whole = count / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += of(values[i + lane]);
  for (std::size_t i = whole; i < count; ++i) sums[i - whole] += of(values[i]);
  return std::all_of(sums, sums + kLanes, all);
}

}  // namespace

bool usable(const float* gradients, std::size_t count) {
  const auto size = [](float x) { return std::abs(x); };
  const auto small = [](float x) { return x <= kMaxGradient; };
  return lanes_are(gradients, count, size, small) ||  // what is small in sum is small
         std::all_of(gradients, gradients + count, [&](float x) { return small(size(x)); });
}

bool finite(const float* values, std::size_t count) {
  return lanes_are(values, count, [](float x) { return x - x; }, [](float x) { return x == 0; });
}

void initialize_state(const OptimizerSpec& spec, float* state, int dim) {
  std::fill(state, state + state_floats(spec.kind, dim), 0.0f);
  switch (spec.kind) {
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kDynamicWdAdagrad:
    case OptimizerKind::kFtrl:
    case OptimizerKind::kGroupFtrl:
      std::fill(state, state + dim, spec.initial_accumulator_value);
      break;
    case OptimizerKind::kGroupAdagrad:
      state[0] = spec.initial_accumulator_value;
      break;
    case OptimizerKind::kAdam:
      state[2 * dim] = spec.beta1;
      state[2 * dim + 1] = spec.beta2;
      break;
    case OptimizerKind::kAmsgrad:
      state[3 * dim] = spec.beta1;
      state[3 * dim + 1] = spec.beta2;
      break;
    default:
      break;
  }
}

}  // namespace monolith
