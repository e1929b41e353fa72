// The update rules of the sparse optimizers: how one segment of one row takes a step.
//
// Each rule exists once, here, for the core and for kernels; the reference in numpy is
// src/monolith/table/update_rules.py. All arithmetic is float32 in the order written and never fused (both
// compilers are told so), so that every machine, thread count and device gives the same bits.
//
// To add an optimizer: a struct here and a line in MONOLITH_OPTIMIZERS, its settings and state in
// src/monolith/table/optimizers.py, its reference in update_rules.py. A setting of a new name is also a field
// of OptimizerSpec (native/src/optimizers.h).
//
// A rule is a struct with
//
//   kVectors, kScalars   its state in a segment of d values: kVectors * d floats, then kScalars floats
//   initial(o, i, d)     float i of the state of a new row
//   step(o, values, rate, step)
//   kInDouble            only if it computes with doubles, which are half as many to a register
//
// `o` has the settings by name: constants on a device, fields of OptimizerSpec in the core. `values` is the
// segment:
//
//   values.each(f)       calls f(w, g, state...) for each value: references to its weight and to its float of
//                        each state vector, and its gradient
//   values.sum(f)        the sum of f(w, g, state...) over the values, in their order
//   values.largest(f)    the largest of f(w, g, state...), at least 0
//   values.scalars()     the floats of state after the vectors
//   values.count()       how many values there are
//
// The core calls f with vectors of 4 to 16 values at a time (see portable.h), so its parameters are `auto`
// and a condition on a value is written `a < b ? x : y`, which chooses lane by lane. Left to vectorize such
// loops by itself, g++ gives up on many of them, as the code around them happens to be.
//
// On a device the threads of a tile share the values of a segment; sum and largest give all of them the same
// answer, and each has its own copy of the scalars.
#pragma once

#include "portable.h"

namespace monolith {

// A gradient is usable if none of its floats is NaN or larger than this. Squares of such, and sums of many
// squares, are finite, and so are the rows that they train.
constexpr float kMaxGradient = 1e15f;

// Division by an accumulator that may still be empty: nothing accumulated, nothing to do.
template <class Numerator, class Floats>
MONOLITH_SHARED Floats over(Numerator numerator, Floats denominator) {
  return denominator != 0 ? numerator / denominator : Floats{};
}

// What is left of a value of 1 after `steps` steps that each take the fraction `decay` of it. In double, and
// by squares instead of pow, so that it is the same everywhere.
MONOLITH_SHARED float kept_after(float decay, i64 steps) {
  double base = 1.0 - static_cast<double>(decay);
  double kept = 1.0;
  for (; steps > 0; steps >>= 1, base *= base)
    if ((steps & 1) != 0) kept *= base;
  return static_cast<float>(kept);
}

// A step counter is an int64 whose bits are two floats of the state, the low half first.
MONOLITH_SHARED void put_step(float* at, i64 step) {
  at[0] = float_with(static_cast<u32>(static_cast<u64>(step)));
  at[1] = float_with(static_cast<u32>(static_cast<u64>(step) >> 32));
}

MONOLITH_SHARED i64 step_of(const float* at) {
  return static_cast<i64>(static_cast<u64>(bits_of(at[0])) | static_cast<u64>(bits_of(at[1])) << 32);
}

namespace rules {

// The state of a rule that starts with zeros.
template <int vectors, int scalars>
struct ZeroState {
  static constexpr int kVectors = vectors;
  static constexpr int kScalars = scalars;

  template <class O>
  MONOLITH_SHARED static float initial(const O&, int, int) {
    return 0.0f;
  }
};

// The state of a rule whose first vector, or only scalar, is an accumulator.
template <int vectors, int scalars>
struct AccumulatorState {
  static constexpr int kVectors = vectors;
  static constexpr int kScalars = scalars;

  template <class O>
  MONOLITH_SHARED static float initial(const O& o, int i, int d) {
    return i < (vectors > 0 ? d : 1) ? o.initial_accumulator_value : 0.0f;
  }
};

struct Sgd : ZeroState<0, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O&, Values& values, float rate, i64) {
    values.each([=](auto& w, auto g) MONOLITH_INLINE { w -= rate * g; });
  }
};

struct Adagrad : AccumulatorState<1, 0> {
  template <bool kDecay, class Floats>
  MONOLITH_SHARED static void value(Floats& w, Floats& norm, Floats grad, float rate, float decay) {
    if constexpr (kDecay) grad += decay * w;
    norm += grad * grad;
    w = w - over(rate, root(norm)) * grad;
  }

  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float decay = o.weight_decay;
    if (decay != 0)
      values.each([=](auto& w, auto g, auto& norm) MONOLITH_INLINE { value<true>(w, norm, g, rate, decay); });
    else
      values.each([=](auto& w, auto g, auto& norm)
                      MONOLITH_INLINE { value<false>(w, norm, g, rate, decay); });
  }
};

// Adagrad with the decay next to the adaptive step (decoupled) or inside the gradient (coupled). With lazy
// decay the row first decays by every step since its last, this one included; its counter is then one more
// than the step of its last update, so that 0 is a row that never had one. A step that comes late, or again,
// takes nothing more.
struct DynamicWdAdagrad : AccumulatorState<1, 2> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64 step) {
    float* const counter = values.scalars();
    if (o.lazy_decay) {
      const i64 seen = step_of(counter);
      const i64 now = step + 1;
      const float kept = kept_after(rate * o.weight_decay, seen == 0 ? 1 : now - seen);
      values.each([=](auto& w, auto g, auto& norm) MONOLITH_INLINE {
        norm = norm + g * g;
        w = w * kept - over(rate, root(norm)) * g;
      });
      put_step(counter, seen > now ? seen : now);
      return;
    }
    if (!o.decouple_weight_decay) {
      Adagrad::step(o, values, rate, step);
    } else {
      const float decay = rate * o.weight_decay;
      values.each([=](auto& w, auto g, auto& norm) MONOLITH_INLINE {
        norm = norm + g * g;
        w -= over(rate, root(norm)) * g + decay * w;
      });
    }
    put_step(counter, step);
  }
};

struct Adadelta : ZeroState<2, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float rho = o.rho;
    const float epsilon = o.epsilon;
    const float decay = o.weight_decay;
    values.each([=](auto& w, auto g, auto& accum, auto& accum_update) MONOLITH_INLINE {
      const auto grad = g + decay * w;
      const auto a = rho * accum + (1 - rho) * grad * grad;
      const auto u = over(root(accum_update + epsilon), root(a + epsilon)) * grad;
      w -= rate * u;
      accum_update = rho * accum_update + (1 - rho) * u * u;
      accum = a;
    });
  }
};

// Adam's scalars are the powers of beta1 and beta2 of the row's next step.
template <int vectors>
struct AdamState {
  static constexpr int kVectors = vectors;
  static constexpr int kScalars = 2;

  template <class O>
  MONOLITH_SHARED static float initial(const O& o, int i, int d) {
    return i == vectors * d ? o.beta1 : i == vectors * d + 1 ? o.beta2 : 0.0f;
  }

  template <class O>
  MONOLITH_SHARED static float alpha(const float* powers, float rate, const O&) {
    return rate * root(1 - powers[1]) / (1 - powers[0]);
  }

  // The weight's change, given its gradient and, updated here, the means of gradients and of their squares.
  template <class O, class Floats>
  MONOLITH_SHARED static Floats mean(const O& o, Floats grad, Floats& m, Floats& v) {
    m += (grad - m) * (1 - o.beta1);
    v += (grad * grad - v) * (1 - o.beta2);
    return o.use_nesterov ? (1 - o.beta1) * grad + o.beta1 * m : m;
  }

  template <class O>
  MONOLITH_SHARED static void advance(const O& o, float* powers) {
    powers[0] *= o.beta1;
    powers[1] *= o.beta2;
  }
};

struct Adam : AdamState<2> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float by = alpha(values.scalars(), rate, o);
    values.each([=, &o](auto& w, auto g, auto& m, auto& v) MONOLITH_INLINE {
      const auto up = mean(o, g + o.weight_decay * w, m, v);
      w -= over(by * up, root(v) + o.epsilon);
    });
    advance(o, values.scalars());
  }
};

struct Amsgrad : AdamState<3> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float by = alpha(values.scalars(), rate, o);
    values.each([=, &o](auto& w, auto g, auto& m, auto& v, auto& vhat) MONOLITH_INLINE {
      const auto up = mean(o, g + o.weight_decay * w, m, v);
      vhat = vhat < v ? v : vhat;
      w -= over(by * up, root(vhat) + o.epsilon);
    });
    advance(o, values.scalars());
  }
};

// Not a gradient at all: a moving estimate of how many steps pass between two sightings of an id.
struct BatchSoftmax : ZeroState<0, 2> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O&, Values& values, float rate, i64 step) {
    const float passed = static_cast<float>(step - step_of(values.scalars()));
    values.each([=](auto& w, auto) MONOLITH_INLINE { w = (1 - rate) * w + rate * passed; });
    put_step(values.scalars(), step);
  }
};

// A rate of zero, as at the first step of a warm-up, leaves the rules that divide by it untouched.
struct Ftrl : AccumulatorState<2, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    if (rate == 0) return;
    const float l1 = o.l1;
    const float l2 = o.l2;
    const float beta = o.beta;
    values.each([=](auto& w, auto g, auto& norm, auto& zero) MONOLITH_INLINE {
      const auto n = norm + g * g;
      const auto length = root(n);
      const auto sigma = (length - root(norm)) / rate;
      const auto z = zero + (g - sigma * w);
      const auto pull = rate * (with_sign(l1, z) - z);
      norm = n;
      zero = z;
      w = over(magnitude_of(z) <= l1 ? zero_like(w) : pull, length + beta + l2 * rate);
    });
  }
};

struct GroupFtrl : AccumulatorState<2, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    if (rate == 0) return;
    const float l1 = o.l1;
    const float l2 = o.l2;
    const float beta = o.beta;
    values.each([=](auto& w, auto g, auto& norm, auto& zero) MONOLITH_INLINE {
      const auto n = norm + g * g;
      const auto sigma = (root(n) - root(norm)) / rate;
      zero = zero + (g - sigma * w);
      norm = n;
    });
    const float length = root(values.sum([](auto, auto, auto, auto z) MONOLITH_INLINE { return z * z; }));
    if (length < l1 || length == 0) {
      values.each([](auto& w, auto, auto&, auto&) MONOLITH_INLINE { w = zero_like(w); });
      return;
    }
    const float shrink = (l1 - length) / length;
    values.each([=](auto& w, auto, auto& norm, auto& zero)
                    MONOLITH_INLINE { w = over(rate * zero * shrink, beta + root(norm) + l2 * rate); });
  }
};

struct GroupAdagrad : AccumulatorState<0, 1> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float decay = o.weight_decay;
    const float largest = values.largest([=](auto w, auto g) MONOLITH_INLINE {
      const auto grad = g + decay * w;
      return grad * grad;
    });
    float& sum = values.scalars()[0];
    sum = sum + largest;
    const float step_size = rate / (o.beta + root(sum));
    // A rate of zero, or nothing accumulated and no gradient.
    if (!(step_size > 0) || !is_finite(step_size)) return;
    const auto z = [=](auto w, auto g) MONOLITH_INLINE { return g + decay * w - w / step_size; };
    const float length = root(values.sum([=](auto w, auto g) MONOLITH_INLINE { return z(w, g) * z(w, g); }));
    if (length < o.l2 || length == 0) {
      values.each([](auto& w, auto) MONOLITH_INLINE { w = zero_like(w); });
      return;
    }
    const float shrink = -step_size * ((length - o.l2) / length);
    values.each([=](auto& w, auto g) MONOLITH_INLINE { w = shrink * z(w, g); });
  }
};

// Adagrad with one accumulator for all values, of the mean of their squared gradients.
struct RowwiseAdagrad : AccumulatorState<0, 1> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float decay = o.weight_decay;
    const float squares = values.sum([=](auto w, auto g) MONOLITH_INLINE {
      const auto grad = g + decay * w;
      return grad * grad;
    });
    float& norm = values.scalars()[0];
    norm = norm + squares / static_cast<float>(values.count());
    const float step_size = over(rate, root(norm));
    values.each([=](auto& w, auto g) MONOLITH_INLINE { w = w - step_size * (g + decay * w); });
  }
};

struct Momentum : ZeroState<1, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float mu = o.momentum;
    const float decay = o.weight_decay;
    const bool nesterov = o.use_nesterov;
    values.each([=](auto& w, auto g, auto& n) MONOLITH_INLINE {
      const auto velocity = mu * n - rate * (g + decay * w);
      w += nesterov ? -mu * n + (1 + mu) * velocity : velocity;
      n = velocity;
    });
  }
};

struct MovingAverage : ZeroState<0, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float, i64) {
    const float mu = o.momentum;
    values.each([=](auto& w, auto g) MONOLITH_INLINE { w = mu * w + (1 - mu) * g; });
  }
};

// In double, since the divisor is 1 and more.
template <bool kAverage>
struct RmspropOf : ZeroState<1, 0> {
  static constexpr bool kInDouble = true;

  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const double mu = o.momentum;
    const double decay = o.weight_decay;
    values.each([=](auto& w, auto g, auto& mean) MONOLITH_INLINE {
      const auto grad = doubles_of(g) + decay * doubles_of(w);
      const auto n = mu * doubles_of(mean) + (kAverage ? 1 - mu : 1.0) * grad * grad;
      w = floats_like(w, doubles_of(w) - static_cast<double>(rate) / (root(n) + 1.0) * grad);
      mean = floats_like(mean, n);
    });
  }
};

using Rmsprop = RmspropOf<true>;
using RmspropV2 = RmspropOf<false>;

}  // namespace rules

// Every rule with its name in configs.
#define MONOLITH_OPTIMIZERS(X)              \
  X(Sgd, "sgd")                             \
  X(Adagrad, "adagrad")                     \
  X(DynamicWdAdagrad, "dynamic_wd_adagrad") \
  X(Adadelta, "adadelta")                   \
  X(Adam, "adam")                           \
  X(Amsgrad, "amsgrad")                     \
  X(BatchSoftmax, "batch_softmax")          \
  X(Ftrl, "ftrl")                           \
  X(GroupAdagrad, "group_adagrad")          \
  X(GroupFtrl, "group_ftrl")                \
  X(Momentum, "momentum")                   \
  X(MovingAverage, "moving_average")        \
  X(Rmsprop, "rmsprop")                     \
  X(RmspropV2, "rmspropv2")                 \
  X(RowwiseAdagrad, "rowwise_adagrad")

}  // namespace monolith
