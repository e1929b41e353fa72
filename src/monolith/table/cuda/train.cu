// How rows take steps, compiled for one layout. Serving tables do not include it. The arithmetic is that of
// the core: both compile update_rules.h.
//
// A step of a row, by one tile (see rows.cu):
//
//     fetch values, state and the first gradient -> add the other gradients of the run, in order
//       -> update rule -> round, check that all is finite -> store
//
// Runs of LONG positions or more (one id that dominates a batch) are summed by a block of their own before,
// in a launch of their own (`sum_long_runs`): a tile would take longer for them than all others for the whole
// batch.
//
// Gradients that are not usable (NaN, infinite, absurdly large) are left out and counted. That is found while
// the gradients are fetched for the step, and not before: they are read from memory once.
#pragma once

#include "rows.cu"

__device__ __forceinline__ bool usable(float x) {
  return fabsf(x) <= kMaxGradient;
}

// Whether this lane's part of a gradient is usable; `lanes` threads share the gradient.
__device__ __forceinline__ bool usable_share(const float* gradient, int lane, int lanes) {
  bool all = true;
  if (DIM % 4 == 0 && ((u64)gradient & 15) == 0) {
    for (int v = lane; v < DIM / 4; v += lanes) {
      const float4 four = ((const float4*)gradient)[v];
      all &= usable(four.x) && usable(four.y) && usable(four.z) && usable(four.w);
    }
  } else {
    for (int c = lane; c < DIM; c += lanes) all &= usable(gradient[c]);
  }
  return all;
}

// Finds out whether a gradient is left out. Every thread of a warp must call it, with the same table.
__device__ __forceinline__ void look_at(const float* __restrict__ gradients, i64 i, i64 n,
                                        u8* __restrict__ skip, u64* counters) {
  const int lane = threadIdx.x & (LANES - 1);
  const bool fine = i >= n || usable_share(gradients + i * DIM, lane, LANES);
  const u32 bad = __ballot_sync(0xffffffffu, !fine);
  const bool left_out = (bad & TILE_MASK) != 0;
  if (lane == 0 && i < n) skip[i] = left_out ? UNUSABLE : 0;
  count(&counters[NON_FINITE], lane == 0 && i < n && left_out);
}

// Finds the gradients that are left out, before a step: for tables that must know which ids get a row first.
extern "C" __global__ void find_unusable(const float* __restrict__ gradients, i64 n, u8* __restrict__ skip,
                                         u64* counters) {
  look_at(gradients, ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES, n, skip, counters);
}

// How many floats may be fetched at once: `many` floats that begin at `offset` of rows of `width` floats.
constexpr int wide_enough(int many, int offset, int width) {
  return many % 4 == 0 && offset % 4 == 0 && width % 4 == 0   ? 4
         : many % 2 == 0 && offset % 2 == 0 && width % 2 == 0 ? 2
                                                              : 1;
}

// What a lane holds of a segment in registers during a step: kMany columns of values, gradient and state.
// If the widths allow wide loads, a lane owns consecutive columns (kFollowing); otherwise lane, lane + LANES,
// ...
//
//     LANES = 8, kDim = 32:   lane 0 has columns 0-3, lane 1 has 4-7, ...        one float4 each
//     LANES = 8, kDim = 30:   lane 0 has 0, 8, 16, 24, lane 1 has 1, 9, 17, 25, ...
template <class S>
struct Held {
  static constexpr int kMany = (S::kDim + LANES - 1) / LANES;
  static constexpr int kVectors = S::Rule::kVectors;
  static constexpr int kRest = S::Rule::kScalars;
  static constexpr int kWide = wide_enough(kMany, S::kColumn, DIM);
  static constexpr int kStateWide = kVectors == 0 ? 4 : wide_enough(kMany, S::kState, STATE_DIM);
  static constexpr bool kFollowing = kMany * LANES == S::kDim && kWide > 1 && kStateWide > 1;
  // The columns of a wider row do not fit into registers, and its kernels would take minutes to compile.
  static constexpr int kUnrolled = kMany <= 32 ? kMany : 4;
  float x[kMany];
  float g[kMany];
  float state[kVectors > 0 ? kVectors : 1][kMany];
  float rest[2];  // the same in every lane

  static __device__ __forceinline__ int column(int k, int lane) {
    return kFollowing ? lane * kMany + k : lane + k * LANES;
  }
};

#define EACH_COLUMN                                               \
  _Pragma("unroll Held<S>::kUnrolled") for (int k = 0; k < kMany; \
                                            ++k) if (const int c = Held<S>::column(k, lane); c < S::kDim)

// A lane's columns of a segment's floats, fetched and put `WIDE` at once.
template <class S, int WIDE>
__device__ __forceinline__ void fetch(const float* from, float (&into)[Held<S>::kMany], int lane) {
  constexpr int kMany = Held<S>::kMany;
  if constexpr (Held<S>::kFollowing && WIDE == 4) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 4) {
      const float4 four = *(const float4*)(from + lane * kMany + k);
      into[k] = four.x, into[k + 1] = four.y, into[k + 2] = four.z, into[k + 3] = four.w;
    }
  } else if constexpr (Held<S>::kFollowing && WIDE == 2) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 2) {
      const float2 two = *(const float2*)(from + lane * kMany + k);
      into[k] = two.x, into[k + 1] = two.y;
    }
  } else {
    EACH_COLUMN into[k] = from[c];
  }
}

template <class S, int WIDE>
__device__ __forceinline__ void put(float* to, const float (&from)[Held<S>::kMany], int lane) {
  constexpr int kMany = Held<S>::kMany;
  if constexpr (Held<S>::kFollowing && WIDE == 4) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 4)
      *(float4*)(to + lane * kMany + k) = make_float4(from[k], from[k + 1], from[k + 2], from[k + 3]);
  } else if constexpr (Held<S>::kFollowing && WIDE == 2) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 2) *(float2*)(to + lane * kMany + k) = make_float2(from[k], from[k + 1]);
  } else {
    EACH_COLUMN to[c] = from[k];
  }
}

// A lane's columns of the values of a segment, fetched from a row and put into it as it stores them.
template <class S>
__device__ __forceinline__ void fetch_values(const u8* row, float (&into)[Held<S>::kMany], int lane) {
#if BFLOAT16 || FLOAT16
  constexpr int kMany = Held<S>::kMany;
  const u16* const from = (const u16*)row + S::kColumn;
  if constexpr (Held<S>::kFollowing && Held<S>::kWide == 4) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 4) {
      const float4 four = four_halves(*(const uint2*)(from + lane * kMany + k));
      into[k] = four.x, into[k + 1] = four.y, into[k + 2] = four.z, into[k + 3] = four.w;
    }
  } else if constexpr (Held<S>::kFollowing && Held<S>::kWide == 2) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 2) {
      const u32 two = *(const u32*)(from + lane * kMany + k);
      into[k] = low_half(two), into[k + 1] = high_half(two);
    }
  } else {
    EACH_COLUMN into[k] = half_value(from[c]);
  }
#elif INT8
  constexpr int kMany = Held<S>::kMany;
  const u8* const from = row + S::kColumn;
  const float scale = scales_of(row)[S::kNumber];
  if constexpr (Held<S>::kFollowing && Held<S>::kWide == 4) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 4) {
      const u32 four = *(const u32*)(from + lane * kMany + k);
#pragma unroll
      for (int b = 0; b < 4; ++b) into[k + b] = code_in(four, b) * scale;
    }
  } else if constexpr (Held<S>::kFollowing && Held<S>::kWide == 2) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 2) {
      const u32 two = *(const u16*)(from + lane * kMany + k);
      into[k] = code_in(two, 0) * scale, into[k + 1] = code_in(two, 1) * scale;
    }
  } else {
    EACH_COLUMN into[k] = (float)(signed char)from[c] * scale;
  }
#else
  fetch<S, Held<S>::kWide>((const float*)row + S::kColumn, into, lane);
#endif
}

// Values of a step go by chances of `key`, or to the nearest.
template <class S>
__device__ __forceinline__ void put_values(u8* row, const float (&from)[Held<S>::kMany], u64 key, int lane,
                                           u32 tile) {
  constexpr int kMany = Held<S>::kMany;
#if BFLOAT16 || FLOAT16
  u32 codes[kMany] = {};
  EACH_COLUMN {
#if !BY_CHANCE
    codes[k] = nearest_half(from[k]);
#elif BFLOAT16
    codes[k] = stochastic_bfloat16(from[k], key, S::kColumn + c);
#else
    codes[k] = stochastic_float16(from[k], key, S::kColumn + c);
#endif
  }
  u16* const to = (u16*)row + S::kColumn;
  const auto two = [&](int k) { return codes[k] | codes[k + 1] << 16; };
  if constexpr (Held<S>::kFollowing && Held<S>::kWide == 4) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 4) *(uint2*)(to + lane * kMany + k) = make_uint2(two(k), two(k + 2));
  } else if constexpr (Held<S>::kFollowing && Held<S>::kWide == 2) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 2) *(u32*)(to + lane * kMany + k) = two(k);
  } else {
    EACH_COLUMN to[c] = (u16)codes[k];
  }
#elif INT8
  u32 largest = 0;
  EACH_COLUMN largest = max(largest, bits_of(from[k]) & 0x7fffffff);
  largest = largest_in(largest, tile);  // of all lanes, which have read the scale that lane 0 overwrites
  const u32 share = int8_share(largest);
  const float scale = int8_scale(
      share, BY_CHANCE ? by_chance(share, key, -1 - S::kNumber, kScaleCut) : to_nearest(share, kScaleCut));
  const float inverse = int8_inverse(largest, scale);
  u32 codes[kMany] = {};
  EACH_COLUMN {
    const u32 raised = int8_raised(from[k], inverse);
    codes[k] = int8_code(raised, BY_CHANCE ? by_chance(bits_of(from[k]), key, S::kColumn + c, kCodeCut)
                                           : to_nearest(raised, kCodeCut));
  }
  if (lane == 0) ((float*)scales_of(row))[S::kNumber] = scale;
  u8* const to = row + S::kColumn;
  if constexpr (Held<S>::kFollowing && Held<S>::kWide == 4) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 4)
      *(u32*)(to + lane * kMany + k) = codes[k] | codes[k + 1] << 8 | codes[k + 2] << 16 | codes[k + 3] << 24;
  } else if constexpr (Held<S>::kFollowing && Held<S>::kWide == 2) {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; k += 2) *(u16*)(to + lane * kMany + k) = (u16)(codes[k] | codes[k + 1] << 8);
  } else {
    EACH_COLUMN to[c] = (u8)codes[k];
  }
#else
  put<S, Held<S>::kWide>((float*)row + S::kColumn, from, lane);
#endif
}

// The sum over the columns in their order, the same in all lanes. Not a tree of shuffles, which would be
// faster: the host adds in this order, and results must be equal to the last bit.
template <class S>
__device__ __forceinline__ float sum_in_order(const float (&x)[Held<S>::kMany], u32 tile) {
  constexpr int kMany = Held<S>::kMany;
  float sum = 0;
  if constexpr (Held<S>::kFollowing) {
#pragma unroll 1
    for (int l = 0; l < LANES; ++l)
#pragma unroll Held < S> ::kUnrolled
      for (int k = 0; k < kMany; ++k) sum += __shfl_sync(tile, x[k], l, LANES);
  } else {
#pragma unroll Held < S> ::kUnrolled
    for (int k = 0; k < kMany; ++k)
#pragma unroll 1
      for (int l = 0; l < LANES; ++l) {
        const float one = __shfl_sync(tile, x[k], l, LANES);
        if (k * LANES + l < S::kDim) sum += one;
      }
  }
  return sum;
}

// A segment as update rules see it (`update_rules.h`): the lanes of a tile share its columns. Rules that need
// a sum or a maximum over all columns get it in every lane.
template <class S>
struct TileValues {
  Held<S>& held;
  int lane;
  u32 tile;

  static constexpr int kMany = Held<S>::kMany;
  static constexpr int kVectors = Held<S>::kVectors;

  __device__ __forceinline__ int count() { return S::kDim; }

  __device__ __forceinline__ float* scalars() { return held.rest; }

  // The answer of `f` for column k of this lane.
  template <class F>
  __device__ __forceinline__ auto of(F f, int k) {
    if constexpr (kVectors == 0)
      return f(held.x[k], held.g[k]);
    else if constexpr (kVectors == 1)
      return f(held.x[k], held.g[k], held.state[0][k]);
    else if constexpr (kVectors == 2)
      return f(held.x[k], held.g[k], held.state[0][k], held.state[1][k]);
    else
      return f(held.x[k], held.g[k], held.state[0][k], held.state[1][k], held.state[2][k]);
  }

  template <class F>
  __device__ __forceinline__ void each(F f) {
    EACH_COLUMN of(f, k);
  }

  template <class F>
  __device__ __forceinline__ float sum(F f) {
    float parts[kMany] = {};
    EACH_COLUMN parts[k] = of(f, k);
    return sum_in_order<S>(parts, tile);
  }

  template <class F>
  __device__ __forceinline__ float largest(F f) {
    float most = 0;
    EACH_COLUMN {
      const float one = of(f, k);
      most = most < one ? one : most;
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes >>= 1) {
      const float other = __shfl_xor_sync(tile, most, lanes, LANES);
      most = most < other ? other : most;
    }
    return most;
  }
};

// One step of a segment.
template <class S>
__device__ __forceinline__ void take_step(Held<S>& held, float rate, i64 step, int lane, u32 tile) {
  TileValues<S> values{held, lane, tile};
  S::Rule::step(typename S::Settings{}, values, rate, step);
}

// The gradients of positions that share a row, to be summed in order.
struct Gradients {
  const float* first;
  const float* all;
  const i64* order;
  i64 count;
  const float* latest;  // the values that the first was computed on, or null
  bool aligned;         // whether floats may be fetched by four: others' may lie before them
};

template <class S>
__device__ __forceinline__ void fetch_gradient(const Gradients& by, const float* from,
                                               float (&into)[Held<S>::kMany], int lane) {
  if (by.aligned)
    fetch<S, Held<S>::kWide>(from + S::kColumn, into, lane);
  else
    fetch<S, 1>(from + S::kColumn, into, lane);
}

// What became of a step. NOT_USABLE is returned only if `look` was set, and then by all lanes; NOT_FINITE is
// each lane's own finding, which the caller combines.
enum Outcome { DONE, NOT_FINITE, NOT_USABLE };

// Steps a segment. With STORE false nothing is written: the outcome says whether the row would stay finite.
template <class S, bool STORE>
__device__ __forceinline__ int step_segment(u8* row, float* state_row, u64 hash, const Gradients& by,
                                            float rate, float scale, i64 step, bool look, int lane,
                                            u32 tile) {
  constexpr int d = S::kDim;
  constexpr int kMany = Held<S>::kMany;
  constexpr int kVectors = Held<S>::kVectors;
  constexpr int kRest = Held<S>::kRest;
  float* const state = state_row + S::kState;
  Held<S> held = {};
  // All loads are issued before the first result is used: a step is bound by the latency of memory.
  fetch_values<S>(row, held.x, lane);
  fetch_gradient<S>(by, by.first, held.g, lane);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) fetch<S, Held<S>::kStateWide>(state + v * d, held.state[v], lane);
#pragma unroll
  for (int r = 0; r < kRest; ++r) held.rest[r] = state[kVectors * d + r];
  bool all_usable = true;
  EACH_COLUMN all_usable &= usable(held.g[k]);
#pragma unroll 2
  for (i64 q = 1; q < by.count; ++q) {
    float more[kMany] = {};
    fetch_gradient<S>(by, by.all + by.order[q] * DIM, more, lane);
    EACH_COLUMN {
      all_usable &= usable(more[k]);
      held.g[k] += more[k];
    }
  }
  if (look && !__all_sync(tile, all_usable)) return NOT_USABLE;
  if constexpr (S::kCompressor == ONE_BIT) {
    EACH_COLUMN {
      held.g[k] = held.g[k] * one_bit_slope(held.x[k], scale, S::kAmplitude);
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
  }
  if (STORE) {
    put_values<S>(row, held.x, BY_CHANCE ? rounding_key(hash, SEED, step) : 0, lane, tile);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) put<S, Held<S>::kStateWide>(state + v * d, held.state[v], lane);
  }
  if (STORE && kRest > 0) {
    __syncwarp(tile);  // all lanes have read the scalars that lane 0 overwrites
#pragma unroll
    for (int r = 0; r < kRest; ++r)
      if (lane == 0) state[kVectors * d + r] = held.rest[r];
  }
  return finite ? DONE : NOT_FINITE;
}

// Steps all segments of a row. With several segments the gradients must be checked before: otherwise the
// first segment would be stepped by a gradient that turns out not to be usable in the last.
template <bool STORE>
__device__ __forceinline__ int step_row(u8* row, float* state, u64 hash, const Gradients& by,
                                        const Scalars& scalars, i64 step, bool look, int lane, u32 tile) {
  int outcome = DONE;
#define STEP(p)                                                                                             \
  outcome |= step_segment<Segment##p, STORE>(row, state, hash, by, scalars.rate[p], scalars.scale[p], step, \
                                             SEGMENTS == 1 && look, lane, tile);
  EACH_SEGMENT(STEP)
#undef STEP
  return outcome;
}

// Leaves out the positions of a run whose gradients are not usable, and counts them. The order of the run is
// compacted in place; no other tile reads the positions of this run.
__device__ __forceinline__ void keep_usable(const Table& table, const Writes& writes, const float* gradients,
                                            Run& run, int lane, u32 tile) {
  i64* const order = (i64*)writes.order + run.first;
  i64 kept = 0;
  u32 newest = 0;
  for (i64 q = 0; q < run.count; ++q) {
    const i64 position = order[q];
    if (!__all_sync(tile, usable_share(gradients + position * DIM, lane, LANES))) continue;
    newest = max(newest, writes.time_of(position));
    if (lane == 0) order[kept] = position;
    ++kept;
  }
  __syncwarp(tile);
  if (lane == 0 && kept < run.count) atomicAdd(&table.counters[NON_FINITE], (u64)(run.count - kept));
  run.count = kept;
  run.newest = newest;
}

// Runs of LONG positions or more are summed before the steps, each by a block of its own: a tile sums
// gradient by gradient, a block fetches many at a time. The batch is divided into stretches of STRETCH
// positions, one block each. A run of LONG = 2 STRETCH positions covers at least one whole stretch; the block
// of the first one sums the run and stores the result at the number of that stretch, where the run's tile
// finds it.
//
//     positions  |....rrrr|rrrrrrrr|rrrrrr..|      the block of the middle stretch sums the run
#define LONG 512
#define STRETCH (LONG / 2)

struct LongRun {
  u32 count;     // of usable gradients
  u32 left_out;  // of others
  u32 fresh;
  u32 newest;
};
static_assert(sizeof(LongRun) == 16, "two int64 in memory.py");

// Sums the run whose first whole stretch this is, if there is one and it is long. A block of STRETCH threads;
// all of them take the same returns, so that barriers are met by the whole block.
//
// Gradients are added in the order of the batch, column by column, as a tile would: thread t owns the columns
// t, t + STRETCH, ... and adds row after row. The block fetches chunks of kRows gradients into shared memory.
__device__ __forceinline__ void sum_long_run(const Writes& writes, const float* __restrict__ gradients,
                                             LongRun* __restrict__ runs, float* __restrict__ sums,
                                             i64 stretch) {
  constexpr int kColumns = DIM <= 2048 ? DIM : 2048;
  constexpr int kRows = 8192 / kColumns < STRETCH ? 8192 / kColumns : STRETCH;
  constexpr int kFetched = (kRows * kColumns + STRETCH - 1) / STRETCH;
  constexpr int kSums = (kColumns + STRETCH - 1) / STRETCH;
  __shared__ float chunk[kRows * kColumns];
  __shared__ i64 rows[2][kRows];
  const i64 begin = stretch * STRETCH;
  const int thread = threadIdx.x;
  if (begin + STRETCH > writes.n) return;
  const int place = writes.places[begin];
  if (place == NONE || writes.places[begin + STRETCH - 1] != place) return;
  if (stretch > 0 && writes.places[begin - STRETCH] == place) return;  // not its first
  // Places are sorted: of the STRETCH positions before this stretch, those of this run are the last.
  const i64 before = begin - STRETCH + thread;
  const i64 first =
      begin - __syncthreads_count(before >= 0 && writes.places[before < 0 ? 0 : before] == place);
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
  // Compact the positions of usable gradients in place, in order: a prefix sum over the warps of the block
  // gives each kept position its target. Targets are never behind the positions still to be read.
  __shared__ int kept_by_warp[STRETCH / 32];
  i64* const order = (i64*)writes.order;
  i64 kept = first;
  for (i64 from = first; from < end; from += STRETCH) {
    i64 position = 0;
    bool keep = false;
    if (from + thread < end) {
      position = order[from + thread];
      fresh |= writes.made[position];
      keep = usable_share(gradients + position * DIM, 0, 1);
    }
    if (keep) newest = max(newest, writes.time_of(position));
    const u32 ones = __ballot_sync(0xffffffffu, keep);
    if ((thread & 31) == 0) kept_by_warp[thread / 32] = __popc(ones);
    __syncthreads();
    i64 to = kept + __popc(ones & ((1u << (thread & 31)) - 1));
    for (int w = 0; w < STRETCH / 32; ++w) {
      if (w < thread / 32) to += kept_by_warp[w];
      kept += kept_by_warp[w];
    }
    if (keep) order[to] = position;
    __syncthreads();
  }
  const u32 left_out = (u32)(end - kept);
  end = kept;
  fresh = __syncthreads_or((int)fresh);
  for (int lanes = 16; lanes > 0; lanes >>= 1)
    newest = max(newest, __shfl_xor_sync(0xffffffffu, newest, lanes));
  __shared__ u32 latest;
  if (thread == 0) latest = 0;
  __syncthreads();
  if ((thread & 31) == 0) atomicMax(&latest, newest);
  __syncthreads();
  if (thread == 0) runs[stretch] = {(u32)(end - first), left_out, fresh, latest};
  if (end == first) return;
  // Three stages overlap: chunk k is summed from shared memory, the floats of chunk k + 1 are being loaded
  // into registers (`coming`), and so are the positions of chunk k + 2 (`later`), which say where its floats
  // are.
  const auto row_at = [&](i64 at) { return writes.order[at < end ? at : first]; };
  for (int column = 0; column < DIM; column += kColumns) {
    const int wide = DIM <= kColumns || DIM - column > kColumns ? kColumns : DIM - column;
    float coming[kFetched];
    const auto fetch = [&](const i64* from) {
#pragma unroll
      for (int e = 0; e < kFetched; ++e)
        if (const int i = thread + e * STRETCH; i < kRows * wide)
          coming[e] = gradients[from[i / wide] * DIM + column + i % wide];
    };
    float sum[kSums];
#pragma unroll
    for (int k = 0; k < kSums; ++k)
      if (const int c = thread + k * STRETCH; c < wide) sum[k] = gradients[row_at(first) * DIM + column + c];
    if (thread < kRows) rows[0][thread] = row_at(first + thread);
    i64 later = row_at(first + kRows + thread);
    __syncthreads();
    fetch(rows[0]);
    int turn = 0;
    for (i64 at = first; at < end; at += kRows) {
      turn ^= 1;
      if (thread < kRows) rows[turn][thread] = later;
      later = row_at(at + 2 * kRows + thread);
#pragma unroll
      for (int e = 0; e < kFetched; ++e)
        if (const int i = thread + e * STRETCH; i < kRows * wide) chunk[i] = coming[e];
      __syncthreads();
      if (at + kRows < end) fetch(rows[turn]);
      const int many = end - at < kRows ? (int)(end - at) : kRows;
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        const int c = thread + k * STRETCH;
        if (c < wide) {
#pragma unroll 16
          for (int r = at == first ? 1 : 0; r < many; ++r) sum[k] += chunk[r * wide + c];
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < kSums; ++k)
      if (const int c = thread + k * STRETCH; c < wide) sums[stretch * DIM + column + c] = sum[k];
  }
}

// One block per stretch of the batch.
extern "C" __global__ void sum_long_runs(Writes writes, const float* __restrict__ gradients,
                                         LongRun* __restrict__ runs, float* __restrict__ sums) {
  sum_long_run(writes, gradients, runs, sums, blockIdx.x);
}

// One step per row by the sum of its gradients (`summed`), or one step per gradient in order.
//
// A tile takes `per_tile` positions of the sorted batch, at most one per lane. Lane k fetches place,
// neighbours, position and time of the k-th; then the tile trains the runs that begin among them one by one,
// and lane k's findings are broadcast by shuffles. Waiting for those loads row by row would take longer than
// the steps.
template <bool CHECKED>
__device__ __forceinline__ void train(const Table& table, const Writes& writes, const float* gradients,
                                      const float* latest, const Scalars& scalars, i64 step,
                                      const LongRun* long_runs, const float* long_sums, int summed,
                                      int per_tile, i64 tile_number) {
  const i64 base = tile_number * per_tile;
  const int lane = threadIdx.x & (LANES - 1);
  const u32 tile = TILE_MASK;
  if (base >= writes.n) return;
  const bool aligned = ((u64)gradients & 15) == 0;
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
  u32 newest = 0;
  for (int j = 0; j < per_tile; ++j) {
    Run run;
    run.place = __shfl_sync(tile, place, j, LANES);
    if (run.place == NONE || __shfl_sync(tile, before, j, LANES) == run.place) continue;
    run.first = base + j;
    run.count = 1;
    bool look = true;
    const i64 head = __shfl_sync(tile, position, j, LANES);
    Gradients by{gradients + head * DIM, gradients, writes.order + run.first, 1, nullptr, aligned};
    if (latest != nullptr) by.latest = latest + head * DIM;
    if (__shfl_sync(tile, after, j, LANES) != run.place) {
      run.fresh = __shfl_sync(tile, made, j, LANES) != 0;
      run.newest = __shfl_sync(tile, time, j, LANES);
    } else if (summed && run.first + LONG <= writes.n && writes.places[run.first + LONG - 1] == run.place) {
      const i64 stretch = (run.first + STRETCH - 1) / STRETCH;
      const LongRun known = long_runs[stretch];
      run.fresh = known.fresh != 0;
      run.newest = known.newest;
      by.first = long_sums + stretch * DIM;
      look = false;
      if (known.count == 0) run.count = 0;
      if (lane == 0 && known.left_out != 0) atomicAdd(&table.counters[NON_FINITE], (u64)known.left_out);
    } else {
      run_at(writes, run.first, lane, tile, run);
    }
    // A run of one position, a long run whose sum is known, or a run that is summed here.
    const bool summed_here = look;
    const auto by_usable = [&] {
      keep_usable(table, writes, gradients, run, lane, tile);
      look = false;
    };
    if (look && (SEGMENTS > 1 || (run.count > 1 && !summed))) by_usable();
    u8* const row = table.row(run.place);
    float* const state = table.state(run.place);
    u64 hash = 0;
    if (run.fresh || HASHED) hash = table.hash(run.place);
    if (run.fresh && run.count > 0) {
      start_values(row, hash, lane, tile);
      start_state(state, lane);
      __syncwarp(tile);
    }
    for (i64 q = 0; q < run.count;) {
      if (summed_here && !look) {
        by.first = gradients + by.order[q] * DIM;
        if (latest != nullptr) by.latest = latest + by.order[q] * DIM;
      }
      if (summed_here && summed) by.count = run.count;
      int outcome = DONE;
      if (CHECKED) outcome = step_row<false>(row, state, hash, by, scalars, step, look, lane, tile);
      if (CHECKED && !__all_sync(tile, outcome != NOT_FINITE)) {
        if (lane == 0) atomicAdd(&table.counters[NON_FINITE], 1ULL);
      } else if (outcome != NOT_USABLE) {
        outcome = step_row<true>(row, state, hash, by, scalars, step, look, lane, tile);
      }
      __syncwarp(tile);
      if (outcome == NOT_USABLE)
        by_usable();  // rare: leave those gradients out and take the step again
      else
        q += by.count;
    }
    if (run.count > 0) {
      refresh(table, run, lane);
      newest = max(newest, run.newest);
    } else if (run.fresh && lane == 0) {  // the row was created for gradients that are all left out
      if (drop(table.keys, table.buckets, (u64)run.place, table.counters))
        atomicAdd(&table.counters[INSERTED], (u64)0 - 1ULL);
    }
  }
  if (lane == 0 && newest > __ldcg(&table.counters[NEWEST])) atomicMax(&table.counters[NEWEST], (u64)newest);
}

#define TILE_NUMBER (((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES)

extern "C" __global__ void __launch_bounds__(256, TRAIN_BLOCKS)
    train_rows(Table table, Writes writes, const float* __restrict__ gradients,
               const float* __restrict__ latest, Scalars scalars, i64 step,
               const LongRun* __restrict__ long_runs, const float* __restrict__ long_sums, int summed,
               int per_tile) {
  train<false>(table, writes, gradients, latest, scalars, step, long_runs, long_sums, summed, per_tile,
               TILE_NUMBER);
}

// For steps that could make a row that is not finite: computed without storing, checked, then taken if all is
// fine. Twice the arithmetic, so only tables that need it (`StepScalars.stay_finite`) are launched with it.
extern "C" __global__ void train_rows_checked(Table table, Writes writes, const float* __restrict__ gradients,
                                              const float* __restrict__ latest, Scalars scalars, i64 step,
                                              const LongRun* __restrict__ long_runs,
                                              const float* __restrict__ long_sums, int summed, int per_tile) {
  train<true>(table, writes, gradients, latest, scalars, step, long_runs, long_sums, summed, per_tile,
              TILE_NUMBER);
}
