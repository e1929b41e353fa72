// What is done to rows, made for one layout: `places.cuh` and the layout's constants stand before it.
//
// The layout says DIM, STATE_DIM, ROW_BYTES, SERVING, LANES, SEED, SEGMENTS and has a struct for each segment,
// Segment0 and so on, which EACH_SEGMENT(X) hands to X by number.
//
// A batch is written by runs of equal places: `order` lists its positions sorted by place, equal ones as they
// came. LANES threads do one row, each the columns lane, lane + LANES and so on, so that a float of a row is
// only ever touched by one of them; what is not a column belongs to the first. All arithmetic is float32 in
// the order of native/src/optimizers.cc and never fused: the same bits come out.

enum Optimizer {
  SGD, ADAGRAD, DYNAMIC_WD_ADAGRAD, ADADELTA, ADAM, AMSGRAD, BATCH_SOFTMAX, FTRL, GROUP_ADAGRAD, GROUP_FTRL,
  MOMENTUM, MOVING_AVERAGE, RMSPROP, RMSPROPV2
};
enum Compressor { FP32, FP16, FIXED_R8, ONE_BIT };

#define COLUMN 0x9e3779b97f4a7c15ULL
#define MAX_GRADIENT 1e15f

LAYOUT

// By segment: what changes from step to step.
struct Scalars {
  float rate[SEGMENTS];
  float scale[SEGMENTS];
};

// The arrays of a table.
struct Table {
  u64* keys;
  u64 buckets;
  u32* times;
  u8* values;
  float* states;
  u64* counters;

  __device__ u64 hash(int place) const { return hash_at(keys, buckets, (u64)place); }
  __device__ u8* row(int place) const { return values + (u64)place * ROW_BYTES; }
  __device__ float* state(int place) const { return states + (u64)place * STATE_DIM; }
};

// A batch that is written, sorted by place.
struct Writes {
  const int* places;
  const i64* order;
  i64 n;
  const u8* made;
  const u32* times;
  u32 time;

  __device__ u32 time_of(i64 position) const { return times != nullptr ? times[position] : time; }
};

// ---- values --------------------------------------------------------------------------------------

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_with(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ u32 half_of(float value) {
  const u32 bits = bits_of(value);
  const u32 sign = bits >> 16 & 0x8000;
  const u32 magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) return sign | (bits_of(float_with(magnitude) + 0.5f) - 0x3f000000);
  const u32 odd = magnitude >> 13 & 1;
  return sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

__device__ __forceinline__ float float_of(u32 half) {
  const u32 sign = (half & 0x8000) << 16;
  const u32 magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_with(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) return float_with(sign | bits_of((float)magnitude * 0x1p-24f));
  return float_with(sign | ((magnitude << 13) + 0x38000000));
}

__device__ __forceinline__ u32 next_half(u32 half, bool up) {
  if ((half & 0x7fff) == 0) return up ? 0x0001 : 0x8001;
  return (up != ((half & 0x8000) != 0) ? half + 1 : half - 1) & 0xffff;
}

__device__ __forceinline__ float round_to_half(float value, float chance) {
  if (!isfinite(value)) return value;
  if (fabsf(value) >= 65504.0f) return copysignf(65504.0f, value);
  const u32 nearest = half_of(value);
  const float exact = float_of(nearest);
  if (exact == value) return value;
  const float down = exact < value ? exact : float_of(next_half(nearest, false));
  const float up = exact > value ? exact : float_of(next_half(nearest, true));
  return chance <= (value - down) / (up - down) ? up : down;
}

__device__ __forceinline__ int r8_code(float value, float range) {
  const float step = range / 128.0f;
  if (isnan(value)) return 0;
  const float scaled = (value + copysignf(step * 0.5f, value == 0 ? 1.0f : value)) / step;
  const float whole = truncf(scaled);
  return (int)(whole < -128.0f ? -128.0f : whole > 127.0f ? 127.0f : whole);
}

__device__ __forceinline__ float r8_value(int code, float range) { return (float)code * (range / 128.0f); }

__device__ __forceinline__ float draw(u64 salt, int column) {
  return (float)(mix(salt + SEED + COLUMN * (u64)(column + 1)) >> 40) * 0x1p-24f;
}

template <class S>
__device__ __forceinline__ float decoded(const u8* row, int i) {
  if (S::kCompressor == FP16) {
    const u8* at = row + S::kByte + 2 * i;
    return float_of((u32)at[0] | (u32)at[1] << 8);
  }
  if (S::kCompressor == FIXED_R8) return r8_value((signed char)row[S::kByte + i], S::kRange);
  if (S::kCompressor == ONE_BIT)
    return (signed char)row[S::kByte + i] > 0 ? S::kAmplitude : -S::kAmplitude;
  const u8* at = row + S::kByte + 4 * i;
  return float_with((u32)at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24);
}

template <class S>
__device__ __forceinline__ void encode(u8* row, int i, float x) {
  if (S::kCompressor == FP16) {
    const u32 half = half_of(x);
    row[S::kByte + 2 * i] = (u8)half;
    row[S::kByte + 2 * i + 1] = (u8)(half >> 8);
  } else if (S::kCompressor == FIXED_R8) {
    row[S::kByte + i] = (u8)r8_code(x, S::kRange);
  } else if (S::kCompressor == ONE_BIT) {
    row[S::kByte + i] = (u8)(x > 0 ? 1 : -1);
  } else {
    const u32 bits = bits_of(x);
    for (int b = 0; b < 4; ++b) row[S::kByte + 4 * i + b] = (u8)(bits >> 8 * b);
  }
}

#define OF_COLUMN(p) if (column < Segment##p::kColumn + Segment##p::kDim)

// The value of a column as stored.
__device__ __forceinline__ float read_value(const u8* row, int column) {
#if SERVING
#define READ(p) OF_COLUMN(p) return decoded<Segment##p>(row, column - Segment##p::kColumn);
  EACH_SEGMENT(READ)
#undef READ
  return 0;
#else
  return ((const float*)row)[column];
#endif
}

__device__ __forceinline__ void write_value(u8* row, int column, float x) {
#if SERVING
#define WRITE(p)                                                \
  OF_COLUMN(p) {                                                \
    encode<Segment##p>(row, column - Segment##p::kColumn, x);   \
    return;                                                     \
  }
  EACH_SEGMENT(WRITE)
#undef WRITE
#else
  ((float*)row)[column] = x;
#endif
}

// What training sees of a value.
template <class S>
__device__ __forceinline__ float view(float x, float scale) {
  if (S::kCompressor == FIXED_R8) return r8_value(r8_code(x, S::kRange), S::kRange);
  if (S::kCompressor == ONE_BIT) return S::kAmplitude * tanhf(scale * x);
  return x;
}

__device__ __forceinline__ float seen_value(const u8* row, int column, const Scalars& scalars) {
  const float x = read_value(row, column);
#if !SERVING
#define SEE(p) OF_COLUMN(p) return view<Segment##p>(x, scalars.scale[p]);
  EACH_SEGMENT(SEE)
#undef SEE
#endif
  return x;
}

// ---- new rows ------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ float first_value(u64 hash, int i) {
  if (S::kLow == S::kHigh) return S::kLow;
  return S::kLow + (S::kHigh - S::kLow) * draw(hash, S::kColumn + i);
}

template <class S>
__device__ __forceinline__ float first_state(int i) {
  constexpr int d = S::kDim;
  if (S::kOptimizer == ADAGRAD || S::kOptimizer == DYNAMIC_WD_ADAGRAD || S::kOptimizer == FTRL ||
      S::kOptimizer == GROUP_FTRL || S::kOptimizer == GROUP_ADAGRAD)
    return i < d ? S::kInitialAccumulator : 0.0f;
  constexpr int powers = S::kOptimizer == ADAM ? 2 * d : S::kOptimizer == AMSGRAD ? 3 * d : -2;
  return powers < 0 ? 0.0f : i == powers ? S::kBeta1 : i == powers + 1 ? S::kBeta2 : 0.0f;
}

__device__ __forceinline__ void start_values(u8* row, u64 hash, int lane) {
#define START(p)                                       \
  for (int i = lane; i < Segment##p::kDim; i += LANES) \
    write_value(row, Segment##p::kColumn + i, first_value<Segment##p>(hash, i));
  EACH_SEGMENT(START)
#undef START
}

__device__ __forceinline__ void start_state(float* state, int lane) {
#define START(p)                                                                       \
  for (int i = lane; i < (SERVING ? 0 : Segment##p::kStateDim); i += LANES)            \
    state[Segment##p::kState + i] = first_state<Segment##p>(i);
  EACH_SEGMENT(START)
#undef START
}

// ---- reading -------------------------------------------------------------------------------------

// Finds and copies in one go. 16 threads look at a bucket at once; four ids are on their way together.
extern "C" __global__ void lookup(Table table, const i64* __restrict__ ids, i64 n, Scalars scalars,
                                  float* __restrict__ out) {
  constexpr int kTogether = 4;
  const u64* __restrict__ keys = table.keys;
  const i64 tile = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / KEYS;
  const i64 tiles = (i64)gridDim.x * blockDim.x / KEYS;
  const int lane = threadIdx.x & (KEYS - 1);
  const u32 mask = 0xffffu << (threadIdx.x & 16);
  for (i64 i = tile * kTogether; i < n; i += tiles * kTogether) {
    u64 hash[kTogether], key[kTogether], bucket[kTogether];
    i64 place[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      hash[j] = mix((u64)ids[i + j < n ? i + j : n - 1]);
      bucket[j] = __umul64hi(hash[j], table.buckets);
      key[j] = keys[bucket[j] * KEYS + lane];
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      place[j] = -1;
      if (hash[j] <= MARK) {
        const u64 own = table.buckets * KEYS + hash[j];
        if (keys[own] != FREE) place[j] = (i64)own;
        continue;
      }
      for (u64 seen = 0; seen < table.buckets; ++seen) {
        const u32 hit = __ballot_sync(mask, key[j] == hash[j]) & mask;
        if (hit != 0) {
          place[j] = (i64)(bucket[j] * KEYS + ((__ffs(hit) - 1) & (KEYS - 1)));
          break;
        }
        if ((__ballot_sync(mask, key[j] == FREE) & mask) != 0) break;
        if (++bucket[j] == table.buckets) bucket[j] = 0;
        key[j] = keys[bucket[j] * KEYS + lane];
      }
    }
#if PLAIN && DIM % 4 == 0
    constexpr int kFours = DIM / 4;
    const float4* __restrict__ rows = (const float4*)table.values;
    float4* __restrict__ to = (float4*)out;
    for (int v = lane; v < kFours; v += KEYS) {
      float4 four[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        four[j] = place[j] < 0 ? make_float4(0, 0, 0, 0) : rows[place[j] * kFours + v];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (i + j < n) __stcs(&to[(i + j) * kFours + v], four[j]);
    }
#else
    for (int j = 0; j < kTogether; ++j)
      if (i + j < n)
        for (int c = lane; c < DIM; c += KEYS)
          out[(i + j) * DIM + c] = place[j] < 0 ? 0.0f : seen_value(table.row((int)place[j]), c, scalars);
#endif
  }
}

// Whole rows by their places, zeros where there is none.
extern "C" __global__ void read_rows(Table table, const int* __restrict__ places, i64 n,
                                     i64* __restrict__ times, float* __restrict__ values,
                                     float* __restrict__ states) {
  const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x & 31;
  if (i >= n) return;
  const int place = places[i];
  const bool there = place != NONE;
  if (lane == 0) times[i] = there ? (i64)table.times[place] : 0;
  for (int c = lane; c < DIM; c += 32) values[i * DIM + c] = there ? read_value(table.row(place), c) : 0.0f;
  for (int s = lane; s < STATE_DIM; s += 32)
    states[i * STATE_DIM + s] = there ? table.state(place)[s] : 0.0f;
}

// ---- writing -------------------------------------------------------------------------------------

// Positions of a batch that share a row.
struct Run {
  int place;
  i64 first;
  i64 count;
  bool fresh;
  u32 newest;
};

// The run that begins at `at` of the sorted batch, to all lanes of a tile; false when none begins there.
__device__ __forceinline__ bool run_at(const Writes& writes, i64 at, int lane, u32 tile, Run& run) {
  if (at >= writes.n) return false;
  run.place = writes.places[at];
  if (run.place == NONE || (at > 0 && writes.places[at - 1] == run.place)) return false;
  u32 fresh = 0;
  u32 newest = 0;
  u32 count = 0;
  for (i64 j = at + lane; j < writes.n && writes.places[j] == run.place; j += LANES) {
    const i64 position = writes.order[j];
    fresh |= writes.made[position];
    newest = max(newest, writes.time_of(position));
    ++count;
  }
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes >>= 1) {
    fresh |= __shfl_xor_sync(tile, fresh, lanes, LANES);
    newest = max(newest, __shfl_xor_sync(tile, newest, lanes, LANES));
    count += __shfl_xor_sync(tile, count, lanes, LANES);
  }
  run.first = at;
  run.count = count;
  run.fresh = fresh != 0;
  run.newest = newest;
  return true;
}

// The lanes of a tile within its warp.
#define TILE_MASK \
  (LANES == 32 ? 0xffffffffu : ((1u << (LANES & 31)) - 1) << (threadIdx.x & 31 & ~(LANES - 1)))

#define TILE                                                                  \
  const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;        \
  const int lane = threadIdx.x & (LANES - 1);                                 \
  const u32 tile = TILE_MASK;                                                 \
  Run run;                                                                    \
  if (!run_at(writes, at, lane, tile, run)) return;

__device__ __forceinline__ void refresh(const Table& table, const Run& run, int lane) {
  if (lane == 0) table.times[run.place] = run.fresh ? run.newest : max(table.times[run.place], run.newest);
}

// Sets values: of equal ids the last. `whole` rows bring their time, and their state unless it is null.
extern "C" __global__ void put_rows(Table table, Writes writes, const float* __restrict__ values,
                                    const float* __restrict__ states, int whole) {
  TILE
  const i64 last = writes.order[run.first + run.count - 1];
  u8* const row = table.row(run.place);
  for (int c = lane; c < DIM; c += LANES) write_value(row, c, values[last * DIM + c]);
  if (whole && states != nullptr)
    for (int s = lane; s < STATE_DIM; s += LANES) table.state(run.place)[s] = states[last * STATE_DIM + s];
  else if (whole || run.fresh)
    start_state(table.state(run.place), lane);
  if (!whole)
    refresh(table, run, lane);
  else if (lane == 0)
    table.times[run.place] = writes.time_of(last);
}

extern "C" __global__ void add_rows(Table table, Writes writes, const float* __restrict__ values) {
  TILE
  u8* const row = table.row(run.place);
  if (run.fresh) {
    start_values(row, table.hash(run.place), lane);
    start_state(table.state(run.place), lane);
    __syncwarp(tile);
  }
  for (i64 q = 0; q < run.count; ++q) {
    const i64 position = writes.order[run.first + q];
    for (int c = lane; c < DIM; c += LANES)
      write_value(row, c, read_value(row, c) + values[position * DIM + c]);
  }
  refresh(table, run, lane);
}

extern "C" __global__ void reset_rows(Table table, Writes writes, signed char* __restrict__ status) {
  TILE
  start_values(table.row(run.place), table.hash(run.place), lane);
  start_state(table.state(run.place), lane);
  for (i64 q = lane; q < run.count; q += LANES)
    status[writes.order[run.first + q]] = run.fresh && q == 0 ? 0 : 1;
  if (lane == 0) table.times[run.place] = run.newest;
}

// ---- training ------------------------------------------------------------------------------------

#if !SERVING

// Which gradients nothing is trained by.
extern "C" __global__ void find_unusable(const float* __restrict__ gradients, i64 n, u8* __restrict__ skip,
                                         u64* counters) {
  const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int lane = threadIdx.x & (LANES - 1);
  bool usable = true;
  if (i < n)
    for (int c = lane; c < DIM; c += LANES) usable &= fabsf(gradients[i * DIM + c]) <= MAX_GRADIENT;
  const u32 bad = __ballot_sync(0xffffffffu, !usable);
  const bool left_out = (bad & TILE_MASK) != 0;
  if (lane == 0 && i < n) skip[i] = left_out ? UNUSABLE : 0;
  count(&counters[NON_FINITE], lane == 0 && i < n && left_out);
}

__device__ __forceinline__ float over(float numerator, float denominator) {
  return denominator != 0 ? numerator / denominator : 0.0f;
}

#define EACH_COLUMN                                  \
  _Pragma("unroll") for (int k = 0; k < kMany; ++k) \
    if (const int c = lane + k * LANES; c < d)

// The sum over the columns, in their order.
template <int d, int kMany>
__device__ __forceinline__ float sum_in_order(const float (&x)[kMany], u32 tile) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kMany; ++k)
#pragma unroll 1
    for (int l = 0; l < LANES; ++l) {
      const float one = __shfl_sync(tile, x[k], l, LANES);
      if (k * LANES + l < d) sum += one;
    }
  return sum;
}

__device__ __forceinline__ void put_step(float* at, i64 step) {
  at[0] = float_with((u32)(u64)step);
  at[1] = float_with((u32)((u64)step >> 32));
}

__device__ __forceinline__ i64 step_of(const float* at) {
  return (i64)((u64)bits_of(at[0]) | (u64)bits_of(at[1]) << 32);
}

// Floats of state that there is one of for each value, and floats behind those.
template <int kind>
struct StateOf {
  static constexpr int kVectors =
      kind == AMSGRAD ? 3
      : kind == ADADELTA || kind == ADAM || kind == FTRL || kind == GROUP_FTRL ? 2
      : kind == SGD || kind == MOVING_AVERAGE || kind == BATCH_SOFTMAX || kind == GROUP_ADAGRAD ? 0 : 1;
  static constexpr int kRest =
      kind == ADAM || kind == AMSGRAD || kind == DYNAMIC_WD_ADAGRAD || kind == BATCH_SOFTMAX ? 2
      : kind == GROUP_ADAGRAD ? 1 : 0;
};

// What a lane holds of a segment while it takes a step: its columns of values, gradient and state.
template <class S>
struct Held {
  static constexpr int kMany = (S::kDim + LANES - 1) / LANES;
  static constexpr int kVectors = StateOf<S::kOptimizer>::kVectors;
  static constexpr int kRest = StateOf<S::kOptimizer>::kRest;
  float x[kMany];
  float g[kMany];
  float state[kVectors > 0 ? kVectors : 1][kMany];
  float rest[2];  // the same in every lane
};

// One step of a segment.
template <class S>
__device__ __forceinline__ void take_step(Held<S>& held, float rate, i64 step, int lane, u32 tile) {
  constexpr int d = S::kDim;
  constexpr int kMany = Held<S>::kMany;
  constexpr int kind = S::kOptimizer;
  float (&x)[kMany] = held.x;
  const float (&g)[kMany] = held.g;
  auto& state = held.state;
  float (&rest)[2] = held.rest;
  if constexpr (kind == SGD) {
    EACH_COLUMN x[k] -= rate * g[k];
  } else if constexpr (kind == ADAGRAD || (kind == DYNAMIC_WD_ADAGRAD && !S::kDecouple)) {
    EACH_COLUMN {
      float grad = g[k];
      if (S::kWeightDecay != 0) grad += S::kWeightDecay * x[k];
      const float sum = state[0][k] + grad * grad;
      state[0][k] = sum;
      x[k] = x[k] - over(rate, sqrtf(sum)) * grad;
    }
    if (kind == DYNAMIC_WD_ADAGRAD) put_step(rest, step);
  } else if constexpr (kind == DYNAMIC_WD_ADAGRAD) {
    const float decay = rate * S::kWeightDecay;
    EACH_COLUMN {
      const float norm = state[0][k] + g[k] * g[k];
      state[0][k] = norm;
      x[k] -= over(rate, sqrtf(norm)) * g[k] + decay * x[k];
    }
    put_step(rest, step);
  } else if constexpr (kind == ADADELTA) {
    EACH_COLUMN {
      const float grad = g[k] + S::kWeightDecay * x[k];
      const float a = S::kRho * state[0][k] + (1 - S::kRho) * grad * grad;
      const float u = over(sqrtf(state[1][k] + S::kEpsilon), sqrtf(a + S::kEpsilon)) * grad;
      x[k] -= rate * u;
      state[1][k] = S::kRho * state[1][k] + (1 - S::kRho) * u * u;
      state[0][k] = a;
    }
  } else if constexpr (kind == ADAM || kind == AMSGRAD) {
    const float alpha = rate * sqrtf(1 - rest[1]) / (1 - rest[0]);
    EACH_COLUMN {
      const float grad = g[k] + S::kWeightDecay * x[k];
      float m = state[0][k];
      float v = state[1][k];
      m += (grad - m) * (1 - S::kBeta1);
      v += (grad * grad - v) * (1 - S::kBeta2);
      float square = v;
      if constexpr (kind == AMSGRAD) {
        const float largest = state[2][k];
        square = largest < v ? v : largest;
        state[2][k] = square;
      }
      const float up = S::kNesterov ? (1 - S::kBeta1) * grad + S::kBeta1 * m : m;
      x[k] -= over(alpha * up, sqrtf(square) + S::kEpsilon);
      state[0][k] = m;
      state[1][k] = v;
    }
    rest[0] *= S::kBeta1;
    rest[1] *= S::kBeta2;
  } else if constexpr (kind == BATCH_SOFTMAX) {
    EACH_COLUMN x[k] = (1 - rate) * x[k] + rate * (float)(step - step_of(rest));
    put_step(rest, step);
  } else if constexpr (kind == FTRL) {
    if (rate == 0) return;
    EACH_COLUMN {
      const float norm = state[0][k];
      const float n = norm + g[k] * g[k];
      const float root = sqrtf(n);
      const float sigma = (root - sqrtf(norm)) / rate;
      const float z = state[1][k] + (g[k] - sigma * x[k]);
      const float moved = over(rate * (copysignf(S::kL1, z) - z), root + S::kBeta + S::kL2 * rate);
      state[0][k] = n;
      state[1][k] = z;
      x[k] = fabsf(z) <= S::kL1 ? 0.0f : moved;
    }
  } else if constexpr (kind == GROUP_FTRL) {
    if (rate == 0) return;
    float squares[kMany] = {};
    EACH_COLUMN {
      const float norm = state[0][k];
      const float n = norm + g[k] * g[k];
      const float sigma = (sqrtf(n) - sqrtf(norm)) / rate;
      const float z = state[1][k] + (g[k] - sigma * x[k]);
      squares[k] = z * z;
      state[0][k] = n;
      state[1][k] = z;
    }
    const float length = sqrtf(sum_in_order<d>(squares, tile));
    if (length < S::kL1 || length == 0) {
      EACH_COLUMN x[k] = 0;
      return;
    }
    const float shrink = (S::kL1 - length) / length;
    EACH_COLUMN x[k] = over(rate * state[1][k] * shrink, S::kBeta + sqrtf(state[0][k]) + S::kL2 * rate);
  } else if constexpr (kind == GROUP_ADAGRAD) {
    float largest = 0;
    EACH_COLUMN {
      const float grad = g[k] + S::kWeightDecay * x[k];
      const float square = grad * grad;
      largest = largest < square ? square : largest;
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes >>= 1) {
      const float other = __shfl_xor_sync(tile, largest, lanes, LANES);
      largest = largest < other ? other : largest;
    }
    rest[0] = rest[0] + largest;
    const float pace = rate / (S::kBeta + sqrtf(rest[0]));
    if (!(pace > 0) || !isfinite(pace)) return;
    float squares[kMany] = {};
    EACH_COLUMN {
      const float z = g[k] + S::kWeightDecay * x[k] - x[k] / pace;
      squares[k] = z * z;
    }
    const float length = sqrtf(sum_in_order<d>(squares, tile));
    if (length < S::kL2 || length == 0) {
      EACH_COLUMN x[k] = 0;
      return;
    }
    const float shrink = -pace * ((length - S::kL2) / length);
    EACH_COLUMN x[k] = shrink * (g[k] + S::kWeightDecay * x[k] - x[k] / pace);
  } else if constexpr (kind == MOMENTUM) {
    EACH_COLUMN {
      const float dx = rate * (g[k] + S::kWeightDecay * x[k]);
      const float n = S::kMomentum * state[0][k] - dx;
      x[k] += S::kNesterov ? -S::kMomentum * state[0][k] + (1 + S::kMomentum) * n : n;
      state[0][k] = n;
    }
  } else if constexpr (kind == MOVING_AVERAGE) {
    EACH_COLUMN x[k] = S::kMomentum * x[k] + (1 - S::kMomentum) * g[k];
  } else {
    const double mu = S::kMomentum;
    EACH_COLUMN {
      const double grad = (double)g[k] + (double)S::kWeightDecay * x[k];
      const double n = mu * state[0][k] + (kind == RMSPROP ? 1 - mu : 1.0) * grad * grad;
      x[k] = (float)(x[k] - (double)rate / (sqrt(n) + 1) * grad);
      state[0][k] = (float)n;
    }
  }
}

// The gradients of positions that share a row, to be summed in order.
struct Gradients {
  const float* first;
  const float* all;
  const i64* order;
  i64 count;
  const float* latest;  // the values that the first was computed on, or null
};

// Steps a segment; false where that would make a value that is not finite. Nothing is written unless STORE.
template <class S, bool STORE>
__device__ __forceinline__ bool step_segment(float* row, float* state_row, u64 hash, const Gradients& by,
                                             float rate, float scale, i64 step, int lane, u32 tile) {
  constexpr int d = S::kDim;
  constexpr int kMany = Held<S>::kMany;
  constexpr int kVectors = Held<S>::kVectors;
  constexpr int kRest = Held<S>::kRest;
  float* const state = state_row + S::kState;
  Held<S> held = {};
  // All that memory has to say is asked for before the first of it is looked at.
  EACH_COLUMN {
    held.x[k] = row[S::kColumn + c];
    held.g[k] = by.first[S::kColumn + c];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) held.state[v][k] = state[v * d + c];
  }
#pragma unroll
  for (int r = 0; r < kRest; ++r) held.rest[r] = state[kVectors * d + r];
#pragma unroll 2
  for (i64 q = 1; q < by.count; ++q) {
    const float* const more = by.all + by.order[q] * DIM + S::kColumn;
    EACH_COLUMN held.g[k] += more[c];
  }
  if constexpr (S::kCompressor == ONE_BIT) {
    EACH_COLUMN {
      const float t = tanhf(scale * held.x[k]);
      held.g[k] = held.g[k] * (S::kAmplitude * scale * (1 - t * t));
    }
  }
  if constexpr (S::kDelayed) {
    EACH_COLUMN {
      const float g = held.g[k];
      held.g[k] = g + S::kLambda * g * g * (held.x[k] - by.latest[S::kColumn + c]);
    }
  }
  take_step<S>(held, rate, step, lane, tile);
  bool finite = true;
  EACH_COLUMN {
    if constexpr (S::kRounded) {
      const u64 salt = hash + mix((u64)step);
      held.x[k] = round_to_half(held.x[k], draw(salt + bits_of(held.x[k]), S::kColumn + c));
    }
    finite &= held.x[k] - held.x[k] == 0;
    if (STORE) {
      row[S::kColumn + c] = held.x[k];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) state[v * d + c] = held.state[v][k];
    }
  }
  if (STORE && kRest > 0) {
    __syncwarp(tile);  // everyone has read it
#pragma unroll
    for (int r = 0; r < kRest; ++r)
      if (lane == 0) state[kVectors * d + r] = held.rest[r];
  }
  return finite;
}

template <bool STORE>
__device__ __forceinline__ bool step_row(float* row, float* state, u64 hash, const Gradients& by,
                                         const Scalars& scalars, i64 step, int lane, u32 tile) {
  bool finite = true;
#define STEP(p)                                                                                         \
  finite &= step_segment<Segment##p, STORE>(row, state, hash, by, scalars.rate[p], scalars.scale[p], step, \
                                            lane, tile);
  EACH_SEGMENT(STEP)
#undef STEP
  return finite;
}

// Runs of so many positions are summed before the steps, each by a block of its own: what a tile would sum
// gradient by gradient, a block fetches many at a time. Such a run has all of at least one stretch of half its
// length that begins at a multiple of that, and what is known of it stands at the first of those.
#define LONG 512
#define STRETCH (LONG / 2)

struct LongRun {
  i64 count;
  u32 fresh;
  u32 newest;
};

#define CHUNK_ROWS (DIM <= 64 ? 64 : DIM <= 128 ? 32 : DIM <= 512 ? 8 : 1)
#define CHUNK_COLUMNS (DIM <= 2048 ? DIM : 2048)

// One block of STRETCH threads for each stretch.
extern "C" __global__ void sum_long_runs(Writes writes, const float* __restrict__ gradients,
                                         LongRun* __restrict__ runs, float* __restrict__ sums) {
  __shared__ float chunk[CHUNK_ROWS * CHUNK_COLUMNS];
  __shared__ i64 rows[CHUNK_ROWS];
  const i64 stretch = blockIdx.x;
  const i64 begin = stretch * STRETCH;
  const int thread = threadIdx.x;
  if (begin + STRETCH > writes.n) return;
  const int place = writes.places[begin];
  if (place == NONE || writes.places[begin + STRETCH - 1] != place) return;
  if (stretch > 0 && writes.places[begin - STRETCH] == place) return;  // not its first
  // Sorted, so that of the positions before those of this run are the last.
  const i64 before = begin - STRETCH + thread;
  const i64 first = begin - __syncthreads_count(before >= 0 && writes.places[before < 0 ? 0 : before] == place);
  i64 end = begin + STRETCH;
  u32 fresh = 0;
  u32 newest = 0;
  for (;;) {
    const i64 at = end + thread;
    const int more = __syncthreads_count(at < writes.n && writes.places[at < writes.n ? at : 0] == place);
    end += more;
    if (more < STRETCH) break;
  }
  if (end - first < LONG) return;
  for (i64 at = first + thread; at < end; at += STRETCH) {
    const i64 position = writes.order[at];
    fresh |= writes.made[position];
    newest = max(newest, writes.time_of(position));
  }
  fresh = __syncthreads_or((int)fresh);
  for (int lanes = 16; lanes > 0; lanes >>= 1) newest = max(newest, __shfl_xor_sync(0xffffffffu, newest, lanes));
  __shared__ u32 latest;
  if (thread == 0) latest = 0;
  __syncthreads();
  if ((thread & 31) == 0) atomicMax(&latest, newest);
  __syncthreads();
  if (thread == 0) runs[stretch] = {end - first, fresh, latest};
  for (int column = 0; column < DIM; column += CHUNK_COLUMNS) {
    const int wide = DIM <= CHUNK_COLUMNS || DIM - column > CHUNK_COLUMNS ? CHUNK_COLUMNS : DIM - column;
    float sum[(CHUNK_COLUMNS + STRETCH - 1) / STRETCH] = {};
    for (i64 at = first; at < end; at += CHUNK_ROWS) {
      const int many = end - at < CHUNK_ROWS ? (int)(end - at) : CHUNK_ROWS;
      if (thread < many) rows[thread] = writes.order[at + thread];
      __syncthreads();
#pragma unroll 8
      for (int i = thread; i < many * wide; i += STRETCH)
        chunk[i] = gradients[rows[i / wide] * DIM + column + i % wide];
      __syncthreads();
#pragma unroll
      for (int k = 0; k < (CHUNK_COLUMNS + STRETCH - 1) / STRETCH; ++k) {
        const int c = thread + k * STRETCH;
        if (c < wide)
          for (int r = 0; r < many; ++r) {
            const float one = chunk[r * wide + c];
            sum[k] = at == first && r == 0 ? one : sum[k] + one;
          }
      }
    }
#pragma unroll
    for (int k = 0; k < (CHUNK_COLUMNS + STRETCH - 1) / STRETCH; ++k)
      if (const int c = thread + k * STRETCH; c < wide) sums[stretch * DIM + column + c] = sum[k];
    __syncthreads();
  }
}

// One step for each row, by the sum of its gradients, or one for each gradient in order. A tile takes
// `per_tile` positions, up to one for each lane: what is to be known of them is fetched together, because
// waiting for it row by row takes longer than the steps.
template <bool CHECKED>
__device__ __forceinline__ void train(const Table& table, const Writes& writes, const float* gradients,
                                      const float* latest, const Scalars& scalars, i64 step,
                                      const LongRun* long_runs, const float* long_sums, int summed,
                                      int per_tile) {
  const i64 base = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES * per_tile;
  const int lane = threadIdx.x & (LANES - 1);
  const u32 tile = TILE_MASK;
  if (base >= writes.n) return;
  const i64 own = base + lane;
  int place = NONE;
  int before = NONE;
  int after = NONE;
  i64 position = 0;
  u32 made = 0;
  u32 time = 0;
  if (lane < per_tile && own < writes.n) {
    place = writes.places[own];
    if (own > 0) before = writes.places[own - 1];
    if (own + 1 < writes.n) after = writes.places[own + 1];
    position = writes.order[own];
    made = writes.made[position];
    time = writes.time_of(position);
  }
  for (int j = 0; j < per_tile; ++j) {
    Run run;
    run.place = __shfl_sync(tile, place, j, LANES);
    if (run.place == NONE || __shfl_sync(tile, before, j, LANES) == run.place) continue;
    run.first = base + j;
    const i64 head = __shfl_sync(tile, position, j, LANES);
    Gradients by{gradients + head * DIM, gradients, writes.order + run.first, 1, nullptr};
    if (__shfl_sync(tile, after, j, LANES) != run.place) {
      run.count = 1;
      run.fresh = __shfl_sync(tile, made, j, LANES) != 0;
      run.newest = __shfl_sync(tile, time, j, LANES);
    } else if (summed && run.first + LONG <= writes.n && writes.places[run.first + LONG - 1] == run.place) {
      const i64 stretch = (run.first + STRETCH - 1) / STRETCH;
      const LongRun known = long_runs[stretch];
      run.count = 1;  // they are summed
      run.fresh = known.fresh != 0;
      run.newest = known.newest;
      by.first = long_sums + stretch * DIM;
    } else {
      run_at(writes, run.first, lane, tile, run);
      if (summed) by.count = run.count;
    }
    float* const row = (float*)table.row(run.place);
    float* const state = table.state(run.place);
    u64 hash = 0;
    if (run.fresh || ROUNDED) hash = table.hash(run.place);
    if (run.fresh) {
      start_values((u8*)row, hash, lane);
      start_state(state, lane);
      __syncwarp(tile);
    }
    for (i64 q = 0; q < run.count; q += by.count) {
      if (q > 0) by.first = gradients + by.order[q] * DIM;
      if (latest != nullptr) by.latest = latest + (q > 0 ? by.order[q] : head) * DIM;
      bool taken = true;
      if (CHECKED) {
        const bool finite = step_row<false>(row, state, hash, by, scalars, step, lane, tile);
        taken = __all_sync(tile, finite);
        if (!taken && lane == 0) atomicAdd(&table.counters[NON_FINITE], 1ULL);
      }
      if (taken) step_row<true>(row, state, hash, by, scalars, step, lane, tile);
      __syncwarp(tile);
    }
    refresh(table, run, lane);
  }
}

extern "C" __global__ void train_rows(Table table, Writes writes, const float* __restrict__ gradients,
                                      const float* __restrict__ latest, Scalars scalars, i64 step,
                                      const LongRun* __restrict__ long_runs,
                                      const float* __restrict__ long_sums, int summed, int per_tile) {
  train<false>(table, writes, gradients, latest, scalars, step, long_runs, long_sums, summed, per_tile);
}

// For steps that could make a row that is not finite: computed, looked at, and taken if the row is fine.
extern "C" __global__ void train_rows_checked(Table table, Writes writes, const float* __restrict__ gradients,
                                              const float* __restrict__ latest, Scalars scalars, i64 step,
                                              const LongRun* __restrict__ long_runs,
                                              const float* __restrict__ long_sums, int summed, int per_tile) {
  train<true>(table, writes, gradients, latest, scalars, step, long_runs, long_sums, summed, per_tile);
}

#endif
