// Kernels over the index alone: the same for every table.
#pragma once

#include "places.cuh"

extern "C" __global__ void find_all(const u64* __restrict__ keys, u64 buckets, const i64* __restrict__ ids,
                                    i64 n, int* __restrict__ places) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) places[i] = find(keys, buckets, mix((u64)ids[i]));
}

// The same for hashes: ids that are known by their place in another index.
extern "C" __global__ void find_hashes(const u64* __restrict__ keys, u64 buckets,
                                       const u64* __restrict__ hashes, i64 n, int* __restrict__ places) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) places[i] = find(keys, buckets, hashes[i]);
}

// Gives an id of a batch its place, tells whether it was made for it, and moves the clock on. Every thread of
// a warp calls it, with the same table.
__device__ __forceinline__ int claim_one(u64* keys, u64 buckets, u64* counters, bool there, i64 id, u8 why,
                                         u32 time, bool& fresh) {
  int place = NONE;
  u32 newest = 0;
  fresh = false;
  if (there) {
    if (why == 0) {
      // Most ids have a place. A cache that is behind may only miss it, and claiming looks past that.
      const u64 hash = mix((u64)id);
      place = find(keys, buckets, hash);
      if (place == NONE) place = claim(keys, buckets, hash, fresh);
    }
    if ((why & (UNUSABLE | ELSEWHERE)) == 0) newest = time;
  }
  count(&counters[USED], fresh);
  count(&counters[INSERTED], fresh);
  for (int lanes = 16; lanes > 0; lanes >>= 1)
    newest = max(newest, __shfl_xor_sync(0xffffffffu, newest, lanes));
  if ((threadIdx.x & 31) == 0 && newest > 0 && newest > counters[NEWEST])
    atomicMax(&counters[NEWEST], (u64)newest);
  return place;
}

// Gives every id of a batch its place, and tells which of equal ids made it.
extern "C" __global__ void claim_all(u64* keys, u64 buckets, const i64* __restrict__ ids, i64 n,
                                     const u8* __restrict__ skip, const u32* __restrict__ times, u32 time,
                                     int* __restrict__ places, u8* __restrict__ made, u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const bool there = i < n;
  bool fresh;
  const int place =
      claim_one(keys, buckets, counters, there, there ? ids[i] : 0, there && skip != nullptr ? skip[i] : 0,
                there && times != nullptr ? times[i] : time, fresh);
  if (there) {
    places[i] = place;
    made[i] = fresh;
  }
}

// The same for ids that differ and have no place, which may take marked places, too.
extern "C" __global__ void claim_absent(u64* keys, u64 buckets, const i64* __restrict__ ids, i64 n,
                                        int* __restrict__ places, u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  bool was_free = false;
  bool was_marked = false;
  if (i < n) {
    const u64 hash = mix((u64)ids[i]);
    int found = NONE;
    if (hash <= MARK) {
      found = claim(keys, buckets, hash, was_free);
    } else {
      u64 bucket = __umul64hi(hash, buckets);
      for (u64 seen = 0; seen < buckets && found == NONE; ++seen) {
        for (int j = 0; j < KEYS && found == NONE; ++j) {
          const u64 place = bucket * KEYS + j;
          u64 key = __ldcg(&keys[place]);
          while (key <= MARK) {  // a marked place that another takes is not free again: this ends
            const u64 before = atomicCAS(&keys[place], key, hash);
            if (before == key) {
              found = (int)place;
              was_free = key == FREE;
              was_marked = key == MARK;
              break;
            }
            key = before;
          }
        }
        if (++bucket == buckets) bucket = 0;
      }
    }
    places[i] = found;
  }
  count(&counters[USED], was_free);
  count(&counters[INSERTED], was_free || was_marked);
  const u32 marks = __ballot_sync(0xffffffffu, was_marked);
  if ((threadIdx.x & 31) == 0 && marks != 0) atomicAdd(&counters[MARKS], (u64)0 - (u64)__popc(marks));
}

extern "C" __global__ void drop_places(u64* keys, u64 buckets, const i64* __restrict__ places, i64 n,
                                       u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  bool gone = false;
  if (i < n) gone = drop(keys, buckets, (u64)places[i], counters);
  count(&counters[FOUND], gone);
}

// Which rows are looked for. Flags only where there are any, age only where `aged`.
struct Wanted {
  u64 first;  // hashes, both included
  u64 last;
  u32 latest;  // rows that are not newer
  int aged;    // rows whose age at `now` reached their time to live
  i64 now;
  i64 to_live;
  const i64* to_live_by_slot;
  const u8* flags;
  u32 with;
  u32 without;

  __device__ bool takes(u64 hash, u64 place, u32 time) const {
    if (hash < first || hash > last || time > latest) return false;
    if (flags != nullptr && ((flags[place] & with) != with || (flags[place] & without) != 0)) return false;
    if (!aged) return true;
    const i64 after = to_live_by_slot != nullptr ? to_live_by_slot[slot_of(unmix(hash))] : to_live;
    return now - (i64)time >= after;
  }
};
static_assert(sizeof(Wanted) == 64, "as in memory.py");

// Counts rows and lists them, in any order, as far as there is room.
extern "C" __global__ void list_rows(const u64* __restrict__ keys, u64 buckets,
                                     const u32* __restrict__ row_times, Wanted wanted,
                                     u64* __restrict__ hashes, i64* __restrict__ places, u64 room,
                                     u64* counters) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  bool taken = false;
  u64 hash = 0;
  if (place < buckets * KEYS + 2 && held_at(keys, buckets, place)) {
    hash = hash_at(keys, buckets, place);
    taken = wanted.takes(hash, place, row_times[place]);
  }
  const u32 ones = __ballot_sync(0xffffffffu, taken);
  const int lane = threadIdx.x & 31;
  u64 at = 0;
  if (lane == 0 && ones != 0) at = atomicAdd(&counters[FOUND], (u64)__popc(ones));
  at = __shfl_sync(0xffffffffu, at, 0) + __popc(ones & ((1u << lane) - 1));
  if (taken && at < room) {
    hashes[at] = hash;
    places[at] = (i64)place;
  }
}

// ---- tracking of changes -----------------------------------------------------------------------

// What is known of a place while a snapshot is open or changes are tracked (`tracking.py`).
enum Flag {
  TAKEN = 1,    // the snapshot does not read the row here: it was copied, or it is newer
  CHANGED = 2,  // since the last snapshot
  BEFORE = 4    // between the open snapshot and the one before
};

// Sets flags of a place and returns those it had.
__device__ __forceinline__ u32 set_flags(u8* flags, int place, u32 bits) {
  const int shift = 8 * (place & 3);
  return atomicOr((u32*)(flags + (place & ~3)), bits << shift) >> shift & 0xff;
}

// Rows of a batch are written: they change, and those that were made for it are of no snapshot.
extern "C" __global__ void note_writes(const int* __restrict__ places, const u8* __restrict__ made, i64 n,
                                       u8* flags) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && places[i] != NONE) set_flags(flags, places[i], made[i] ? CHANGED | TAKEN : CHANGED);
}

// ---- rows that move --------------------------------------------------------------------------------

struct alignas(16) Four {
  u32 word[4];
};

// Copies one row for each lane that has one, `from` and `to` places. All lanes of the warp copy together:
// as many rows at a time as they are wide enough for, and four such groups are on their way at once.
template <class Word>
__device__ __forceinline__ void copy_words(const Word* __restrict__ source, Word* __restrict__ target,
                                           int words, i64 from, i64 to) {
  constexpr int kTogether = 4;
  const int lane = threadIdx.x & 31;
  int wide = 32;
  while (wide > 1 && wide / 2 >= words) wide /= 2;
  const int groups = 32 / wide;
  for (int first = 0; first < 32; first += kTogether * groups) {
    i64 rows[kTogether], into[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int row = first + j * groups + lane / wide;
      rows[j] = __shfl_sync(0xffffffffu, from, row & 31);
      into[j] = __shfl_sync(0xffffffffu, to, row & 31);
      if (row >= 32) into[j] = -1;
    }
    for (int w = lane % wide; w < words; w += wide) {
      Word held[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (into[j] >= 0) held[j] = source[(u64)rows[j] * words + w];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (into[j] >= 0) target[(u64)into[j] * words + w] = held[j];
    }
  }
}

// Rows by their words or, where they are of a width that allows it, by four at once.
struct Widths {
  int values;
  int states;
};
static_assert(sizeof(Widths) == 8, "as in memory.py");

__device__ __forceinline__ void copy_rows(const u32* values, const u32* states, u32* new_values,
                                          u32* new_states, Widths words, i64 from, i64 to) {
  if (words.values % 4 == 0)
    copy_words((const Four*)values, (Four*)new_values, words.values / 4, from, to);
  else
    copy_words(values, new_values, words.values, from, to);
  if (words.states % 4 == 0)
    copy_words((const Four*)states, (Four*)new_states, words.states / 4, from, to);
  else
    copy_words(states, new_states, words.states, from, to);
}

// Copies rows that are about to change or to be dropped, each once while a snapshot is open.
extern "C" __global__ void capture_rows(const u64* __restrict__ keys, u64 buckets,
                                        const u32* __restrict__ row_times, const u32* __restrict__ values,
                                        const u32* __restrict__ states, Widths words,
                                        const int* __restrict__ places, i64 n, u8* flags,
                                        u64* __restrict__ hashes, u32* __restrict__ times,
                                        u32* __restrict__ new_values, u32* __restrict__ new_states,
                                        u8* __restrict__ new_flags, u64* captured) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x & 31;
  const int place = i < n ? places[i] : NONE;
  u32 before = TAKEN;
  if (place != NONE) before = set_flags(flags, place, TAKEN);
  const bool first = (before & TAKEN) == 0;
  const u32 ones = __ballot_sync(0xffffffffu, first);
  u64 at = 0;
  if (lane == 0 && ones != 0) at = atomicAdd(captured, (u64)__popc(ones));
  at = __shfl_sync(0xffffffffu, at, 0) + __popc(ones & ((1u << lane) - 1));
  if (first) {
    hashes[at] = hash_at(keys, buckets, (u64)place);
    times[at] = row_times[place];
    new_flags[at] = (u8)before;
  }
  if (ones != 0) copy_rows(values, states, new_values, new_states, words, place, first ? (i64)at : -1);
}

// Moves all rows into an index that has none.
extern "C" __global__ void move_rows(const u64* __restrict__ keys, u64 buckets,
                                     const u32* __restrict__ row_times, const u32* __restrict__ values,
                                     const u32* __restrict__ states, const u8* __restrict__ flags,
                                     Widths words, u64* new_keys, u64 new_buckets,
                                     u32* __restrict__ new_times, u32* __restrict__ new_values,
                                     u32* __restrict__ new_states, u8* __restrict__ new_flags) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  i64 to = -1;
  if (place < buckets * KEYS + 2 && held_at(keys, buckets, place)) {
    bool fresh = false;
    to = claim(new_keys, new_buckets, hash_at(keys, buckets, place), fresh);
    new_times[to] = row_times[place];
    if (flags != nullptr) new_flags[to] = flags[place];
  }
  if (__ballot_sync(0xffffffffu, to >= 0) != 0)
    copy_rows(values, states, new_values, new_states, words, (i64)place, to);
}

// ---- clearing marks away ---------------------------------------------------------------------------

// Notes the rows that are not at home, a bit each, and the buckets they passed by on their way: a free place
// there would hide them.
extern "C" __global__ void note_away(const u64* __restrict__ keys, u64 buckets, u32* __restrict__ away,
                                     u8* __restrict__ passed) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 hash = place < buckets * KEYS ? keys[place] : FREE;
  bool out = false;
  if (hash > MARK) {
    u64 b = __umul64hi(hash, buckets);
    out = b != place / KEYS;
    for (; b != place / KEYS; b = b + 1 == buckets ? 0 : b + 1) passed[b] = 1;
  }
  const u32 ones = __ballot_sync(0xffffffffu, out);
  if ((threadIdx.x & 31) == 0) away[place / 32] = ones;
}

// Frees the marked places of buckets that no row passed by.
extern "C" __global__ void free_marks(u64* keys, u64 buckets, const u8* __restrict__ passed, u64* counters) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const bool freed = place < buckets * KEYS && keys[place] == MARK && passed[place / KEYS] == 0;
  if (freed) keys[place] = FREE;
  const u32 ones = __ballot_sync(0xffffffffu, freed);
  if ((threadIdx.x & 31) == 0 && ones != 0) {
    atomicAdd(&counters[USED], (u64)0 - (u64)__popc(ones));
    atomicAdd(&counters[MARKS], (u64)0 - (u64)__popc(ones));
  }
}

// Copies rows that are not at home to marked places nearer to it; `drop_copied` follows. Only rows that were
// noted before: one that has just come to a place may not be all there.
extern "C" __global__ void pull_rows(u64* keys, u64 buckets, const u32* __restrict__ away, u32* row_times,
                                     u32* values, u32* states, u8* flags, Widths words) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 here = place / KEYS;
  i64 to = -1;
  if (here < buckets && (away[place / 32] >> (place & 31) & 1) != 0) {
    const u64 hash = keys[place];
    for (u64 b = __umul64hi(hash, buckets); b != here && to < 0; b = b + 1 == buckets ? 0 : b + 1)
      for (int j = 0; j < KEYS && to < 0; ++j) {
        const u64 nearer = b * KEYS + j;
        if (__ldcg(&keys[nearer]) == MARK && atomicCAS(&keys[nearer], MARK, hash) == MARK) to = (i64)nearer;
      }
  }
  if (to >= 0) {
    row_times[to] = row_times[place];
    if (flags != nullptr) flags[to] = flags[place];
  }
  if (__ballot_sync(0xffffffffu, to >= 0) != 0)
    copy_rows(values, states, values, states, words, (i64)place, to);
}

// Marks the places of rows that are found nearer to their home.
extern "C" __global__ void drop_copied(u64* keys, u64 buckets) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= buckets * KEYS) return;
  const u64 hash = __ldcg(&keys[place]);
  if (hash > MARK && (u64)find(keys, buckets, hash) != place) keys[place] = MARK;
}
