// Kernels over rows, compiled for one layout.
//
// The layout (`layout.h`, written by layout.py) defines DIM, STATE_DIM, ROW_BYTES, SERVING, BFLOAT16,
// FLOAT16, INT8, BY_CHANCE, LAZY, LANES, SEED, SEGMENTS and a struct for each segment, Segment0 and so on,
// which EACH_SEGMENT(X) passes to X by number.
//
// A batch is written by runs of equal places: `order` lists its positions sorted by place, equal ones as they
// came.
//
//     ids     7  3  7  9        places (sorted)   2  2  5  8       runs: {place 2: positions 0, 2}, {5: 1},
//     {8: 3} place   2  5  2  8        order             0  2  1  3
//
// A tile of LANES threads (a power of two, at most a warp) does one row. Lane k owns the columns k, k + LANES
// and so on: a float of a row is touched by one thread only, so rows need no atomics. Event time and step
// counters belong to lane 0. `tile` is the mask of the tile's lanes for warp-wide calls: tiles of a warp
// diverge.

#pragma once

#include "narrow.h"
#include "places.cuh"
#include "quantize.h"
#include "update_rules.h"

enum Compressor { FP32, FP16, FIXED_R8, ONE_BIT };

#include "layout.h"

// The numbers of a table that change from step to step, by segment: layout.py fills them.
struct Scalars {
  float rate[SEGMENTS];
  float scale[SEGMENTS];
#if LAZY
  float decay[SEGMENTS];  // the share of a value that a step takes
  i64 steps;              // one more than the newest step
#endif
};

struct Table : Arrays {
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
static_assert(sizeof(Writes) == 48, "as in memory.py");

// ---- values --------------------------------------------------------------------------------------

__device__ __forceinline__ float draw(u64 salt, int column) {
  return monolith::draw(salt, SEED, column);
}

template <class S>
__device__ __forceinline__ float decoded(const u8* row, int i) {
  if (S::kCompressor == FP16) {
    const u8* at = row + S::kByte + 2 * i;
    return float_of((u32)at[0] | (u32)at[1] << 8);
  }
  if (S::kCompressor == FIXED_R8) return r8_value((signed char)row[S::kByte + i], S::kRange);
  if (S::kCompressor == ONE_BIT) return (signed char)row[S::kByte + i] > 0 ? S::kAmplitude : -S::kAmplitude;
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

using u16 = unsigned short;

#if BFLOAT16 || FLOAT16
// Values of two bytes, each on its own.
__device__ __forceinline__ float half_value(u32 code) {
  return BFLOAT16 ? bfloat16_value(code) : float_of(code);
}
__device__ __forceinline__ u32 nearest_half(float x) {
  return BFLOAT16 ? nearest_bfloat16(x) : nearest_float16(x);
}
// Two values from one word, the first in its low half.
__device__ __forceinline__ float low_half(u32 word) {
  return half_value(word & 0xffff);
}
__device__ __forceinline__ float high_half(u32 word) {
  return half_value(word >> 16);
}
__device__ __forceinline__ float4 four_halves(uint2 words) {
  return make_float4(low_half(words.x), high_half(words.x), low_half(words.y), high_half(words.y));
}
#endif

#if INT8
// Codes of a byte; from the next word on a scale for each segment (native/src/narrow_rows.h).
__device__ __forceinline__ const float* scales_of(const u8* row) {
  return (const float*)(row + (DIM + 3) / 4 * 4);
}
__device__ __forceinline__ float scale_at(const u8* row, int column) {
#define SCALE(p) OF_COLUMN(p) return scales_of(row)[p];
  EACH_SEGMENT(SCALE)
#undef SCALE
  return 0;
}
// Code `b` of those in a word.
__device__ __forceinline__ float code_in(u32 word, int b) {
  return (float)(signed char)(word >> 8 * b);
}

// The largest in all lanes of a tile.
__device__ __forceinline__ u32 largest_in(u32 own, u32 tile) {
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes >>= 1)
    own = max(own, __shfl_xor_sync(tile, own, lanes, LANES));
  return own;
}
#endif

// The value of a column as stored.
__device__ __forceinline__ float read_value(const u8* row, int column) {
#if SERVING
#define READ(p) OF_COLUMN(p) return decoded<Segment##p>(row, column - Segment##p::kColumn);
  EACH_SEGMENT(READ)
#undef READ
  return 0;
#elif BFLOAT16 || FLOAT16
  return half_value(((const u16*)row)[column]);
#elif INT8
  return (float)(signed char)row[column] * scale_at(row, column);
#else
  return ((const float*)row)[column];
#endif
}

// Columns 4v to 4v + 3 of a training row, by one load; DIM must be a multiple of 4.
__device__ __forceinline__ float4 read_four(const u8* row, int v) {
#if BFLOAT16 || FLOAT16
  return four_halves(((const uint2*)row)[v]);
#elif INT8
  const u32 word = ((const u32*)row)[v];
  return make_float4(code_in(word, 0) * scale_at(row, 4 * v), code_in(word, 1) * scale_at(row, 4 * v + 1),
                     code_in(word, 2) * scale_at(row, 4 * v + 2),
                     code_in(word, 3) * scale_at(row, 4 * v + 3));
#else
  return ((const float4*)row)[v];
#endif
}

#if !INT8
__device__ __forceinline__ void write_value(u8* row, int column, float x) {
#if SERVING
#define WRITE(p)                                              \
  OF_COLUMN(p) {                                              \
    encode<Segment##p>(row, column - Segment##p::kColumn, x); \
    return;                                                   \
  }
  EACH_SEGMENT(WRITE)
#undef WRITE
#elif BFLOAT16 || FLOAT16
  ((u16*)row)[column] = (u16)nearest_half(x);
#else
  ((float*)row)[column] = x;
#endif
}
#endif

// Writes the values that x(i) gives for the columns of a segment, to the nearest. All lanes of a tile call
// it, and x may read the row.
template <class S, class X>
__device__ __forceinline__ void write_segment(u8* row, const X& x, int lane, u32 tile) {
#if INT8
  u32 largest = 0;
  for (int i = lane; i < S::kDim; i += LANES) largest = max(largest, bits_of(x(i)) & 0x7fffffff);
  largest = largest_in(largest, tile);
  const u32 share = int8_share(largest);
  const float scale = int8_scale(share, to_nearest(share, kScaleCut));
  const float inverse = int8_inverse(largest, scale);
  for (int i = lane; i < S::kDim; i += LANES) {
    const u32 raised = int8_raised(x(i), inverse);
    row[S::kColumn + i] = (u8)int8_code(raised, to_nearest(raised, kCodeCut));
  }
  __syncwarp(tile);  // all lanes have read the scale that lane 0 overwrites
  if (lane == 0) ((float*)scales_of(row))[S::kNumber] = scale;
  __syncwarp(tile);
#else
  for (int i = lane; i < S::kDim; i += LANES) write_value(row, S::kColumn + i, x(i));
#endif
}

// A value as training sees it: quantized as it will be when served.
template <class S>
__device__ __forceinline__ float view(float x, float scale) {
  if (S::kCompressor == FIXED_R8) return r8_value(r8_code(x, S::kRange), S::kRange);
  if (S::kCompressor == ONE_BIT) return one_bit_forward(x, scale, S::kAmplitude);
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

// ---- lazy decay: rows decay by steps they take no part in -----------------------------------------
//
// A row stores the last step it took part in. Its decay since then is computed when it is read (`Kept`), and
// applied when it is written (`catch_up`).

#if LAZY
// The factor for the values of each segment after the steps since the row's last one.
struct Kept {
  float of[SEGMENTS];

  __device__ Kept(const float* state, const Scalars& scalars) {
#define KEEP(p)                                                                                        \
  of[p] = 1.0f;                                                                                        \
  if (Segment##p::kLazy) {                                                                             \
    const i64 seen = step_of(state + Segment##p::kState + Segment##p::kDim);                           \
    if (seen != 0 && seen < scalars.steps) of[p] = kept_after(scalars.decay[p], scalars.steps - seen); \
  }
    EACH_SEGMENT(KEEP)
#undef KEEP
  }
};

// What training sees of a value now.
__device__ __forceinline__ float seen_now(const u8* row, int column, const Kept& kept,
                                          const Scalars& scalars) {
  const float x = read_value(row, column);
#define SEE(p) OF_COLUMN(p) return view<Segment##p>(Segment##p::kLazy ? x * kept.of[p] : x, scalars.scale[p]);
  EACH_SEGMENT(SEE)
#undef SEE
  return x;
}

// Decays a row that is about to be written.
__device__ __forceinline__ void catch_up(u8* row, float* state, const Scalars& scalars, int lane, u32 tile) {
  const Kept kept(state, scalars);
  __syncwarp(tile);  // all lanes have read the step counter, which lane 0 overwrites below
#define CATCH_UP(p)                                                                                    \
  if (Segment##p::kLazy) {                                                                             \
    float* const counter = state + Segment##p::kState + Segment##p::kDim;                              \
    const auto decayed = [&](int i) { return read_value(row, Segment##p::kColumn + i) * kept.of[p]; }; \
    write_segment<Segment##p>(row, decayed, lane, tile);                                               \
    if (lane == 0 && step_of(counter) != 0 && step_of(counter) < scalars.steps)                        \
      put_step(counter, scalars.steps);                                                                \
  }
  EACH_SEGMENT(CATCH_UP)
#undef CATCH_UP
  __syncwarp(tile);
}
#endif

// ---- new rows ------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ float first_value(u64 hash, int i) {
  if (S::kLow == S::kHigh) return S::kLow;
  return S::kLow + (S::kHigh - S::kLow) * draw(hash, S::kColumn + i);
}

template <class S>
__device__ __forceinline__ float first_state(int i) {
  return S::Rule::initial(typename S::Settings{}, i, S::kDim);
}

__device__ __forceinline__ void start_values(u8* row, u64 hash, int lane, u32 tile) {
#define START(p) \
  write_segment<Segment##p>(row, [&](int i) { return first_value<Segment##p>(hash, i); }, lane, tile);
  EACH_SEGMENT(START)
#undef START
}

__device__ __forceinline__ void start_state(float* state, int lane) {
#define START(p)                                                            \
  for (int i = lane; i < (SERVING ? 0 : Segment##p::kStateDim); i += LANES) \
    state[Segment##p::kState + i] = first_state<Segment##p>(i);
  EACH_SEGMENT(START)
#undef START
}

// ---- reading -------------------------------------------------------------------------------------

#define TOGETHER 4  // ids whose loads are in flight at once

// Finds and copies in one go: the ids i to i + TOGETHER - 1, by a tile of 16 threads. Lane k reads key k of a
// bucket, so that a bucket is one load of 128 bytes and one ballot. A lookup is bound by the latency of
// memory: the loads of all TOGETHER ids are issued before the first answer is looked at.
__device__ __forceinline__ void look_up(const Table& table, const i64* __restrict__ ids, i64 i, i64 n,
                                        const Scalars& scalars, float* __restrict__ out) {
  const u64* __restrict__ keys = table.keys;
  const int lane = threadIdx.x & (KEYS - 1);
  const u32 mask = 0xffffu << (threadIdx.x & 16);
  u64 hash[TOGETHER], key[TOGETHER], bucket[TOGETHER];
  i64 place[TOGETHER];
#pragma unroll
  for (int j = 0; j < TOGETHER; ++j) {
    hash[j] = mix((u64)ids[i + j < n ? i + j : n - 1]);
    bucket[j] = __umul64hi(hash[j], table.buckets);
    key[j] = keys[bucket[j] * KEYS + lane];
  }
#pragma unroll
  for (int j = 0; j < TOGETHER; ++j) {
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
  if (((u64)out & 15) == 0) {  // next to rows of other widths an answer may have any alignment
    constexpr int kFours = DIM / 4;
    float4* __restrict__ to = (float4*)out;
    for (int v = lane; v < kFours; v += KEYS) {
      float4 four[TOGETHER];
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        four[j] = place[j] < 0 ? make_float4(0, 0, 0, 0) : read_four(table.row((int)place[j]), v);
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        if (i + j < n) __stcs(&to[(i + j) * kFours + v], four[j]);  // evicted first: rows stay in the cache
    }
    return;
  }
#endif
  for (int j = 0; j < TOGETHER; ++j) {
    if (i + j >= n) continue;
    const int at = (int)place[j];
#if LAZY
    const Kept kept(table.state(at < 0 ? 0 : at), scalars);
    for (int c = lane; c < DIM; c += KEYS)
      out[(i + j) * DIM + c] = at < 0 ? 0.0f : seen_now(table.row(at), c, kept, scalars);
#else
    for (int c = lane; c < DIM; c += KEYS)
      out[(i + j) * DIM + c] = at < 0 ? 0.0f : seen_value(table.row(at), c, scalars);
#endif
  }
}

extern "C" __global__ void lookup(Table table, const i64* __restrict__ ids, i64 n, Scalars scalars,
                                  float* __restrict__ out) {
  const i64 tile = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / KEYS;
  const i64 tiles = (i64)gridDim.x * blockDim.x / KEYS;
  for (i64 i = tile * TOGETHER; i < n; i += tiles * TOGETHER) look_up(table, ids, i, n, scalars, out);
}

// Whole rows by their places, zeros for NONE. A warp per row.
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
  for (int s = lane; s < STATE_DIM; s += 32) states[i * STATE_DIM + s] = there ? table.state(place)[s] : 0.0f;
}

// Adds the digest of each row, as native/src/digest.h has it, to that of its bucket of ids. `into` has the
// position of each bucket's sum, or -1 if it was not requested; only ids that are `number` modulo `total`
// count. One thread per place; the warp then works on its rows one by one, since a row has many columns.
extern "C" __global__ void digest_rows(Table table, const int* __restrict__ into, u64 number, u64 total,
                                       u64* sums) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x & 31;
  int at = -1;
  u64 hash = 0;
  if (place < table.buckets * KEYS + 2 && held_at(table.keys, table.buckets, place)) {
    hash = table.hash((int)place);
    at = into[hash >> 52];
    if (at >= 0 && total > 1 && (u64)unmix(hash) % total != number) at = -1;
  }
  for (u32 ones = __ballot_sync(0xffffffffu, at >= 0); ones != 0; ones &= ones - 1) {
    const int of = __ffs(ones) - 1;
    const u64 salt = __shfl_sync(0xffffffffu, hash, of);
    const u8* const row = table.row((int)(place - lane + of));
    u64 sum = 0;
    for (int c = lane; c < DIM; c += 32) sum += value_digest(salt, c, read_value(row, c));
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    const int bucket = __shfl_sync(0xffffffffu, at, of);
    if (lane == 0) atomicAdd(&sums[bucket], mix(salt + sum));
  }
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

// Finds the run that begins at `at` of the sorted batch; false if none begins there. All lanes of the tile
// get the same answer.
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

// One tile per position of the sorted batch. Tiles whose position does not begin a run have nothing to do: a
// run is written by the tile of its first position alone.
#define TILE                                                           \
  const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES; \
  const int lane = threadIdx.x & (LANES - 1);                          \
  const u32 tile = TILE_MASK;                                          \
  Run run;                                                             \
  if (!run_at(writes, at, lane, tile, run)) return;

// Event times only advance: older data does not make a row older.
__device__ __forceinline__ void refresh(const Table& table, const Run& run, int lane) {
  if (lane == 0) table.times[run.place] = run.fresh ? run.newest : max(table.times[run.place], run.newest);
}

// Sets values; of equal ids the last wins. `whole` rows also set their event time, and their state unless it
// is null.
extern "C" __global__ void put_rows(Table table, Writes writes, const float* __restrict__ values,
                                    const float* __restrict__ states, int whole, Scalars scalars) {
  TILE
#if LAZY
      if (!whole && !run.fresh) catch_up(table.row(run.place), table.state(run.place), scalars, lane, tile);
#endif
  const i64 last = writes.order[run.first + run.count - 1];
  u8* const row = table.row(run.place);
#define PUT(p)                                                                   \
  {                                                                              \
    const float* const given = values + last * DIM + Segment##p::kColumn;        \
    write_segment<Segment##p>(row, [&](int i) { return given[i]; }, lane, tile); \
  }
  EACH_SEGMENT(PUT)
#undef PUT
  if (whole && states != nullptr)
    for (int s = lane; s < STATE_DIM; s += LANES) table.state(run.place)[s] = states[last * STATE_DIM + s];
  else if (whole || run.fresh)
    start_state(table.state(run.place), lane);
  if (!whole)
    refresh(table, run, lane);
  else if (lane == 0)
    table.times[run.place] = writes.time_of(last);
}

// Adds values, for equal ids in the order of the batch: the sum is the same to the last bit on every device.
extern "C" __global__ void add_rows(Table table, Writes writes, const float* __restrict__ values,
                                    Scalars scalars) {
  TILE u8* const row = table.row(run.place);
  if (run.fresh) {
    start_values(row, table.hash(run.place), lane, tile);
    start_state(table.state(run.place), lane);
    __syncwarp(tile);
  }
#if LAZY
  if (!run.fresh) catch_up(row, table.state(run.place), scalars, lane, tile);
#endif
  for (i64 q = 0; q < run.count; ++q) {
    const float* const added = values + writes.order[run.first + q] * DIM;
#define ADD(p)                                                                               \
  {                                                                                          \
    constexpr int kFirst = Segment##p::kColumn;                                              \
    const auto sum = [&](int i) { return read_value(row, kFirst + i) + added[kFirst + i]; }; \
    write_segment<Segment##p>(row, sum, lane, tile);                                         \
  }
    EACH_SEGMENT(ADD)
#undef ADD
  }
  refresh(table, run, lane);
}

// Starts rows anew. `status` is 0 for the first position of a new row, 1 for all others.
extern "C" __global__ void reset_rows(Table table, Writes writes, signed char* __restrict__ status) {
  TILE start_values(table.row(run.place), table.hash(run.place), lane, tile);
  start_state(table.state(run.place), lane);
  for (i64 q = lane; q < run.count; q += LANES)
    status[writes.order[run.first + q]] = run.fresh && q == 0 ? 0 : 1;
  if (lane == 0) table.times[run.place] = run.newest;
}
