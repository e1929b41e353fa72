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
//   kVectors, kScalars        its state in a segment of d values: kVectors * d floats, then kScalars floats
//   initial(o, i, d)          float i of the state of a new row
//   step(o, values, rate, step)
//
// `o` has the settings by name: constants on a device, fields of OptimizerSpec in the core. `values` is the
// segment:
//
//   values.each(f)            calls f(w, g, state...) for each value: its weight and gradient, and one float&
//   of
//                             each state vector
//   values.sum(f)             the sum of f(w, g, state...) over the values, in their order
//   values.largest(f)         the largest of f(w, g, state...), at least 0
//   values.scalars()          the floats of state after the vectors
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
MONOLITH_SHARED float over(float numerator, float denominator) {
  return denominator != 0 ? numerator / denominator : 0.0f;
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
    values.each([=](float& w, float g) MONOLITH_INLINE { w -= rate * g; });
  }
};

struct Adagrad : AccumulatorState<1, 0> {
  // Floats is a float, or a vector of them, which the core has; `scaled(norm)` is the rate over its root.
  template <bool kDecay, class Floats, class Scaled>
  MONOLITH_SHARED static void value(Floats& w, Floats& norm, Floats grad, float decay, Scaled scaled) {
    if constexpr (kDecay) grad += decay * w;
    norm += grad * grad;
    w = w - scaled(norm) * grad;
  }

  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float decay = o.weight_decay;
    const auto scaled = [=](float norm) MONOLITH_INLINE { return over(rate, root(norm)); };
    if (decay != 0)
      values.each([=](float& w, float g, float& norm)
                      MONOLITH_INLINE { value<true>(w, norm, g, decay, scaled); });
    else
      values.each([=](float& w, float g, float& norm)
                      MONOLITH_INLINE { value<false>(w, norm, g, decay, scaled); });
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
      values.each([=](float& w, float g, float& norm) MONOLITH_INLINE {
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
      values.each([=](float& w, float g, float& norm) MONOLITH_INLINE {
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
    values.each([=](float& w, float g, float& accum, float& accum_update) MONOLITH_INLINE {
      const float grad = g + decay * w;
      const float a = rho * accum + (1 - rho) * grad * grad;
      const float u = over(root(accum_update + epsilon), root(a + epsilon)) * grad;
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
  template <class O>
  MONOLITH_SHARED static float mean(const O& o, float grad, float& m, float& v) {
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
    values.each([=, &o](float& w, float g, float& m, float& v) MONOLITH_INLINE {
      const float up = mean(o, g + o.weight_decay * w, m, v);
      w -= over(by * up, root(v) + o.epsilon);
    });
    advance(o, values.scalars());
  }
};

struct Amsgrad : AdamState<3> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float by = alpha(values.scalars(), rate, o);
    values.each([=, &o](float& w, float g, float& m, float& v, float& vhat) MONOLITH_INLINE {
      const float up = mean(o, g + o.weight_decay * w, m, v);
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
    values.each([=](float& w, float) MONOLITH_INLINE { w = (1 - rate) * w + rate * passed; });
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
    values.each([=](float& w, float g, float& norm, float& zero) MONOLITH_INLINE {
      const float n = norm + g * g;
      const float length = root(n);
      const float sigma = (length - root(norm)) / rate;
      const float z = zero + (g - sigma * w);
      const float moved = over(rate * (with_sign(l1, z) - z), length + beta + l2 * rate);
      norm = n;
      zero = z;
      w = magnitude_of(z) <= l1 ? 0.0f : moved;
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
    values.each([=](float& w, float g, float& norm, float& zero) MONOLITH_INLINE {
      const float n = norm + g * g;
      const float sigma = (root(n) - root(norm)) / rate;
      zero = zero + (g - sigma * w);
      norm = n;
    });
    const float length = root(values.sum([](float, float, float, float z) MONOLITH_INLINE { return z * z; }));
    if (length < l1 || length == 0) {
      values.each([](float& w, float, float&, float&) MONOLITH_INLINE { w = 0; });
      return;
    }
    const float shrink = (l1 - length) / length;
    values.each([=](float& w, float, float& norm, float& zero)
                    MONOLITH_INLINE { w = over(rate * zero * shrink, beta + root(norm) + l2 * rate); });
  }
};

struct GroupAdagrad : AccumulatorState<0, 1> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float decay = o.weight_decay;
    const float largest = values.largest([=](float w, float g) MONOLITH_INLINE {
      const float grad = g + decay * w;
      return grad * grad;
    });
    float& sum = values.scalars()[0];
    sum = sum + largest;
    const float step_size = rate / (o.beta + root(sum));
    // A rate of zero, or nothing accumulated and no gradient.
    if (!(step_size > 0) || !is_finite(step_size)) return;
    const auto z = [=](float w, float g) MONOLITH_INLINE { return g + decay * w - w / step_size; };
    const float length =
        root(values.sum([=](float w, float g) MONOLITH_INLINE { return z(w, g) * z(w, g); }));
    if (length < o.l2 || length == 0) {
      values.each([](float& w, float) MONOLITH_INLINE { w = 0; });
      return;
    }
    const float shrink = -step_size * ((length - o.l2) / length);
    values.each([=](float& w, float g) MONOLITH_INLINE { w = shrink * z(w, g); });
  }
};

struct Momentum : ZeroState<1, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const float mu = o.momentum;
    const float decay = o.weight_decay;
    const bool nesterov = o.use_nesterov;
    values.each([=](float& w, float g, float& n) MONOLITH_INLINE {
      const float velocity = mu * n - rate * (g + decay * w);
      w += nesterov ? -mu * n + (1 + mu) * velocity : velocity;
      n = velocity;
    });
  }
};

struct MovingAverage : ZeroState<0, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float, i64) {
    const float mu = o.momentum;
    values.each([=](float& w, float g) MONOLITH_INLINE { w = mu * w + (1 - mu) * g; });
  }
};

// In double, since the divisor is 1 and more.
template <bool kAverage>
struct RmspropOf : ZeroState<1, 0> {
  template <class O, class Values>
  MONOLITH_SHARED static void step(const O& o, Values& values, float rate, i64) {
    const double mu = o.momentum;
    const double decay = o.weight_decay;
    values.each([=](float& w, float g, float& mean) MONOLITH_INLINE {
      const double grad = static_cast<double>(g) + decay * w;
      const double n = mu * mean + (kAverage ? 1 - mu : 1.0) * grad * grad;
      w = static_cast<float>(w - static_cast<double>(rate) / (root(n) + 1) * grad);
      mean = static_cast<float>(n);
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
  X(RmspropV2, "rmspropv2")

}  // namespace monolith
