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

#define TILE                                                                  \
  const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;        \
  const int lane = threadIdx.x & (LANES - 1);                                 \
  const u32 tile = LANES == 32 ? 0xffffffffu                                  \
                               : ((1u << (LANES & 31)) - 1) << (threadIdx.x & 31 & ~(LANES - 1)); \
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
  const u32 own = (LANES == 32 ? 0xffffffffu : (1u << (LANES & 31)) - 1) << (threadIdx.x & 31 & ~(LANES - 1));
  const bool left_out = (bad & own) != 0;
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

// One step of a segment by the gradient `g`, each lane its columns of values `x`. State is written where STORE.
template <class S, bool STORE>
__device__ __forceinline__ void take_step(float (&x)[(S::kDim + LANES - 1) / LANES],
                                          const float (&g)[(S::kDim + LANES - 1) / LANES], float* state,
                                          float rate, i64 step, int lane, u32 tile) {
  constexpr int d = S::kDim;
  constexpr int kMany = (d + LANES - 1) / LANES;
  constexpr int kind = S::kOptimizer;
  if constexpr (kind == SGD) {
    EACH_COLUMN x[k] -= rate * g[k];
  } else if constexpr (kind == ADAGRAD || (kind == DYNAMIC_WD_ADAGRAD && !S::kDecouple)) {
    EACH_COLUMN {
      float grad = g[k];
      if (S::kWeightDecay != 0) grad += S::kWeightDecay * x[k];
      const float sum = state[c] + grad * grad;
      if (STORE) state[c] = sum;
      x[k] = x[k] - over(rate, sqrtf(sum)) * grad;
    }
    if (STORE && kind == DYNAMIC_WD_ADAGRAD && lane == 0) put_step(state + d, step);
  } else if constexpr (kind == DYNAMIC_WD_ADAGRAD) {
    const float decay = rate * S::kWeightDecay;
    EACH_COLUMN {
      const float norm = state[c] + g[k] * g[k];
      if (STORE) state[c] = norm;
      x[k] -= over(rate, sqrtf(norm)) * g[k] + decay * x[k];
    }
    if (STORE && lane == 0) put_step(state + d, step);
  } else if constexpr (kind == ADADELTA) {
    EACH_COLUMN {
      const float grad = g[k] + S::kWeightDecay * x[k];
      const float a = S::kRho * state[c] + (1 - S::kRho) * grad * grad;
      const float before = state[d + c];
      const float u = over(sqrtf(before + S::kEpsilon), sqrtf(a + S::kEpsilon)) * grad;
      x[k] -= rate * u;
      if (STORE) {
        state[d + c] = S::kRho * before + (1 - S::kRho) * u * u;
        state[c] = a;
      }
    }
  } else if constexpr (kind == ADAM || kind == AMSGRAD) {
    float* const powers = state + (kind == ADAM ? 2 : 3) * d;
    const float power1 = powers[0];
    const float power2 = powers[1];
    const float alpha = rate * sqrtf(1 - power2) / (1 - power1);
    EACH_COLUMN {
      const float grad = g[k] + S::kWeightDecay * x[k];
      float m = state[c];
      float v = state[d + c];
      m += (grad - m) * (1 - S::kBeta1);
      v += (grad * grad - v) * (1 - S::kBeta2);
      float square = v;
      if constexpr (kind == AMSGRAD) {
        const float largest = state[2 * d + c];
        square = largest < v ? v : largest;
        if (STORE) state[2 * d + c] = square;
      }
      const float up = S::kNesterov ? (1 - S::kBeta1) * grad + S::kBeta1 * m : m;
      x[k] -= over(alpha * up, sqrtf(square) + S::kEpsilon);
      if (STORE) {
        state[c] = m;
        state[d + c] = v;
      }
    }
    __syncwarp(tile);  // everyone has read the powers
    if (STORE && lane == 0) {
      powers[0] = power1 * S::kBeta1;
      powers[1] = power2 * S::kBeta2;
    }
  } else if constexpr (kind == BATCH_SOFTMAX) {
    if (lane == 0) {
      x[0] = (1 - rate) * x[0] + rate * (float)(step - step_of(state));
      if (STORE) put_step(state, step);
    }
  } else if constexpr (kind == FTRL) {
    if (rate == 0) return;
    EACH_COLUMN {
      const float norm = state[c];
      const float n = norm + g[k] * g[k];
      const float root = sqrtf(n);
      const float sigma = (root - sqrtf(norm)) / rate;
      const float z = state[d + c] + (g[k] - sigma * x[k]);
      const float moved = over(rate * (copysignf(S::kL1, z) - z), root + S::kBeta + S::kL2 * rate);
      if (STORE) {
        state[c] = n;
        state[d + c] = z;
      }
      x[k] = fabsf(z) <= S::kL1 ? 0.0f : moved;
    }
  } else if constexpr (kind == GROUP_FTRL) {
    if (rate == 0) return;
    float norms[kMany] = {};
    float zeros[kMany] = {};
    float squares[kMany] = {};
    EACH_COLUMN {
      const float norm = state[c];
      norms[k] = norm + g[k] * g[k];
      const float sigma = (sqrtf(norms[k]) - sqrtf(norm)) / rate;
      zeros[k] = state[d + c] + (g[k] - sigma * x[k]);
      squares[k] = zeros[k] * zeros[k];
      if (STORE) {
        state[c] = norms[k];
        state[d + c] = zeros[k];
      }
    }
    const float length = sqrtf(sum_in_order<d>(squares, tile));
    if (length < S::kL1 || length == 0) {
      EACH_COLUMN x[k] = 0;
      return;
    }
    const float shrink = (S::kL1 - length) / length;
    EACH_COLUMN x[k] = over(rate * zeros[k] * shrink, S::kBeta + sqrtf(norms[k]) + S::kL2 * rate);
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
    const float sum = state[0] + largest;
    __syncwarp(tile);  // everyone has read it
    if (STORE && lane == 0) state[0] = sum;
    const float pace = rate / (S::kBeta + sqrtf(sum));
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
      const float before = state[c];
      const float n = S::kMomentum * before - dx;
      x[k] += S::kNesterov ? -S::kMomentum * before + (1 + S::kMomentum) * n : n;
      if (STORE) state[c] = n;
    }
  } else if constexpr (kind == MOVING_AVERAGE) {
    EACH_COLUMN x[k] = S::kMomentum * x[k] + (1 - S::kMomentum) * g[k];
  } else {
    const double mu = S::kMomentum;
    EACH_COLUMN {
      const double grad = (double)g[k] + (double)S::kWeightDecay * x[k];
      const double n = mu * state[c] + (kind == RMSPROP ? 1 - mu : 1.0) * grad * grad;
      x[k] = (float)(x[k] - (double)rate / (sqrt(n) + 1) * grad);
      if (STORE) state[c] = (float)n;
    }
  }
}

// The gradients of `count` positions of a run, summed, or the one there is.
struct Gradients {
  const float* all;
  const i64* order;
  i64 count;
  const float* latest;  // the values of the first that it was computed on, or null
};

// Steps a segment; false where that would make a value that is not finite. Nothing is written unless STORE.
template <class S, bool STORE>
__device__ __forceinline__ bool step_segment(float* row, float* state, u64 hash, const Gradients& by,
                                             float rate, float scale, i64 step, int lane, u32 tile) {
  constexpr int d = S::kDim;
  constexpr int kMany = (d + LANES - 1) / LANES;
  float x[kMany] = {};
  float g[kMany] = {};
  const i64 first = by.order[0] * DIM + S::kColumn;
  EACH_COLUMN {
    x[k] = row[S::kColumn + c];
    g[k] = by.all[first + c];
  }
#pragma unroll 4
  for (i64 q = 1; q < by.count; ++q) {
    const i64 more = by.order[q] * DIM + S::kColumn;
    EACH_COLUMN g[k] += by.all[more + c];
  }
  if constexpr (S::kCompressor == ONE_BIT) {
    EACH_COLUMN {
      const float t = tanhf(scale * x[k]);
      g[k] = g[k] * (S::kAmplitude * scale * (1 - t * t));
    }
  }
  if constexpr (S::kDelayed) {
    EACH_COLUMN g[k] = g[k] + S::kLambda * g[k] * g[k] * (x[k] - by.latest[S::kColumn + c]);
  }
  take_step<S, STORE>(x, g, state + S::kState, rate, step, lane, tile);
  bool finite = true;
  EACH_COLUMN {
    if constexpr (S::kRounded) {
      const u64 salt = hash + mix((u64)step);
      x[k] = round_to_half(x[k], draw(salt + bits_of(x[k]), S::kColumn + c));
    }
    finite &= x[k] - x[k] == 0;
    if (STORE) row[S::kColumn + c] = x[k];
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

// One step for each row, by the sum of its gradients, or one for each gradient in order. A step that could
// make a row that is not finite is `checked`: computed, looked at, and taken if the row is fine.
extern "C" __global__ void train_rows(Table table, Writes writes, const float* __restrict__ gradients,
                                      const float* __restrict__ latest, Scalars scalars, i64 step,
                                      int summed, int checked) {
  TILE
  float* const row = (float*)table.row(run.place);
  float* const state = table.state(run.place);
  const u64 hash = table.hash(run.place);
  if (run.fresh) {
    start_values((u8*)row, hash, lane);
    start_state(state, lane);
    __syncwarp(tile);
  }
  const i64 many = summed ? run.count : 1;
  for (i64 q = 0; q < run.count; q += many) {
    const i64* const order = writes.order + run.first + q;
    const Gradients by{gradients, order, many, latest != nullptr ? latest + order[0] * DIM : nullptr};
    bool taken = true;
    if (checked) {
      const bool finite = step_row<false>(row, state, hash, by, scalars, step, lane, tile);
      taken = __all_sync(tile, finite);
      if (!taken && lane == 0) atomicAdd(&table.counters[NON_FINITE], 1ULL);
    }
    if (taken) step_row<true>(row, state, hash, by, scalars, step, lane, tile);
    __syncwarp(tile);
  }
  refresh(table, run, lane);
}

#endif
