// Kernels over the index alone: the same for every table.
//
// One thread per id, or one thread per place; warps work together only to add to a counter with one atomic,
// and to copy rows. B is the number of buckets, P = 16 B + 2 the number of places, n the number of ids.
#pragma once

#include "places.cuh"

extern "C" __global__ void find_all(const u64* __restrict__ keys, u64 buckets, const i64* __restrict__ ids,
                                    i64 n, int* __restrict__ places) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) places[i] = find(keys, buckets, mix((u64)ids[i]));
}

// The same for hashes: for rows that moved here from another index.
extern "C" __global__ void find_hashes(const u64* __restrict__ keys, u64 buckets,
                                       const u64* __restrict__ hashes, i64 n, int* __restrict__ places) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) places[i] = find(keys, buckets, hashes[i]);
}

// Returns the place of an id of a batch, which is claimed if it has none (`fresh`), and advances the table's
// clock. Every thread of a warp must call it, with the same table: `there` is false past the end of the
// batch, and `why` not 0 if the position is skipped.
__device__ __forceinline__ int claim_one(u64* keys, u64 buckets, u64* counters, bool there, i64 id, u8 why,
                                         u32 time, bool& fresh) {
  int place = NONE;
  u32 newest = 0;
  fresh = false;
  if (there) {
    if (why == 0) {
      // Most ids have a place, and `find` reads through the L1 cache. A stale cache can only miss a place
      // that was just claimed; `claim` then finds it in L2.
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
  // Most batches do not advance the clock much: a plain read saves most of the atomics. A stale one is at
  // worst too old, which costs an atomic.
  if ((threadIdx.x & 31) == 0 && newest > 0 && newest > counters[NEWEST])
    atomicMax(&counters[NEWEST], (u64)newest);
  return place;
}

// Claims a place for every id of a batch. Of equal ids that had none, one gets `made`: any of them.
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

// The place of a hash that has none: a free or a marked one, the first from its home. Ids of a launch must
// differ. `claim` may not take marks: it would have to search all buckets up to a free place first, and
// between that search and taking the mark another thread with an equal id could take the free place.
__device__ __forceinline__ int claim_first(u64* keys, u64 buckets, u64 hash, bool& was_free,
                                           bool& was_marked) {
  if (hash <= MARK) return claim(keys, buckets, hash, was_free);
  u64 bucket = __umul64hi(hash, buckets);
  for (u64 seen = 0; seen < buckets; ++seen) {
    for (int j = 0; j < KEYS; ++j) {
      const u64 place = bucket * KEYS + j;
      u64 key = __ldcg(&keys[place]);
      while (key <= MARK) {  // ends: a place only goes from free or marked to taken here
        const u64 before = atomicCAS(&keys[place], key, hash);
        if (before == key) {
          was_free = key == FREE;
          was_marked = key == MARK;
          return (int)place;
        }
        key = before;
      }
    }
    if (++bucket == buckets) bucket = 0;
  }
  return NONE;
}

// Counts places that `claim_first` took. Every thread of the warp must call it.
__device__ __forceinline__ void count_first(u64* counters, bool was_free, bool was_marked) {
  count(&counters[USED], was_free);
  const u32 marks = __ballot_sync(0xffffffffu, was_marked);
  if ((threadIdx.x & 31) == 0 && marks != 0) atomicAdd(&counters[MARKS], (u64)0 - (u64)__popc(marks));
}

// Claims places for distinct ids that have none.
extern "C" __global__ void claim_absent(u64* keys, u64 buckets, const i64* __restrict__ ids, i64 n,
                                        int* __restrict__ places, u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  bool was_free = false;
  bool was_marked = false;
  if (i < n) places[i] = claim_first(keys, buckets, mix((u64)ids[i]), was_free, was_marked);
  count_first(counters, was_free, was_marked);
  count(&counters[INSERTED], was_free || was_marked);
}

extern "C" __global__ void drop_places(u64* keys, u64 buckets, const i64* __restrict__ places, i64 n,
                                       u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  bool gone = false;
  if (i < n) gone = drop(keys, buckets, (u64)places[i], counters);
  count(&counters[FOUND], gone);
}

// The rows that `list_rows` lists. Flags are checked if there are any, ages only if `aged`.
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

// Counts rows and lists them, in any order, up to `room` of them. One thread per place; a warp reserves space
// for all its rows with one atomic, and each lane takes the position that follows those of the lanes before
// it.
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

// What is known of a place while a snapshot is open or changes are tracked (`tracking.py`):
//
//     previous snapshot            open snapshot                now
//     -----+---------------------------+------------------------+----> time
//          |<-------- BEFORE --------->|<------- CHANGED ------->|
//
enum Flag {
  TAKEN = 1,    // the snapshot does not read the row here: it was copied, or it is newer
  CHANGED = 2,  // since the last snapshot
  BEFORE = 4    // between the open snapshot and the one before
};

// Sets flags of a place and returns those it had. There are no atomics on bytes, so the four places of a word
// are updated together; the array is padded to whole words.
__device__ __forceinline__ u32 set_flags(u8* flags, int place, u32 bits) {
  const int shift = 8 * (place & 3);
  return atomicOr((u32*)(flags + (place & ~3)), bits << shift) >> shift & 0xff;
}

// Flags the rows of a batch that is about to be written. A row that the batch created is TAKEN, too: it did
// not exist when the snapshot was opened.
extern "C" __global__ void note_writes(const int* __restrict__ places, const u8* __restrict__ made, i64 n,
                                       u8* flags) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && places[i] != NONE) set_flags(flags, places[i], made[i] ? CHANGED | TAKEN : CHANGED);
}

// ---- rows that move --------------------------------------------------------------------------------

struct alignas(16) Four {
  u32 word[4];
};

// Copies one row for each lane with `to` >= 0, from place `from` to place `to`. All 32 lanes copy together,
// so that they read consecutive words: a row of 8 words is copied by 8 lanes, four rows at a time. The loads
// of four such groups are issued before the first store, to hide their latency. Every lane of the warp must
// call it.
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

// Words of 32 bits per row.
struct Widths {
  int values;
  int states;
};
static_assert(sizeof(Widths) == 8, "as in memory.py");

// Copies values and state, by 16 bytes at once if the width allows it.
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

// Copy on write: copies rows that are about to change or to be dropped to the end of the snapshot's buffer,
// each once while the snapshot is open. The atomic on TAKEN decides which of several threads with one place
// copies it; the write itself is a later launch on the same stream, so the copy is of the old row.
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

#define NEVER_IDLE 0x7fffffff

// Writes the stamp of each place (`Recency`), by which idle rows are chosen: NEVER_IDLE for a place without a
// row, and for one with a stamp from `first` on, which must stay. A row without a stamp was made by a
// captured step: it counts as used by `batch`.
extern "C" __global__ void idle_stamps(const u64* __restrict__ keys, u64 buckets, int* __restrict__ stamps,
                                       int batch, int first, int* __restrict__ idle) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= buckets * KEYS + 2) return;
  const bool held = held_at(keys, buckets, place);
  int stamp = stamps[place];
  if (held && stamp == 0) stamps[place] = stamp = batch;
  idle[place] = held && stamp < first ? stamp : NEVER_IDLE;
}

// Moves rows out: copies those at `places` that are not NEVER_IDLE by their stamps (`Recency`), each place
// once, and drops them. `gone` says which. The arrays of the copies are by position in `places`.
extern "C" __global__ void spill_rows(u64* keys, u64 buckets, const u32* __restrict__ row_times,
                                      const u32* __restrict__ values, const u32* __restrict__ states,
                                      Widths words, int* __restrict__ stamps, const i64* __restrict__ places,
                                      const int* __restrict__ stamped, i64 n, u64* __restrict__ hashes,
                                      i64* __restrict__ times, u8* __restrict__ gone,
                                      u32* __restrict__ new_values, u32* __restrict__ new_states,
                                      u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const bool goes = i < n && stamped[i] != NEVER_IDLE;
  const u64 place = goes ? (u64)places[i] : 0;
  if (i < n) {
    hashes[i] = goes ? hash_at(keys, buckets, place) : 0;
    times[i] = goes ? (i64)row_times[place] : 0;
    gone[i] = goes;
  }
  if (__ballot_sync(0xffffffffu, goes) != 0)
    copy_rows(values, states, new_values, new_states, words, (i64)place, goes ? i : -1);
  if (goes) {
    drop(keys, buckets, place, counters);
    stamps[place] = 0;  // of no batch: the next row here has not been used yet
  }
}

// Moves all rows into an empty index. One thread per old place; marks are left behind. Rows differ, so every
// claim succeeds, and the new index is large enough by the caller's choice of its size.
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
//
// A mark may become free only if no row was stored past its bucket. Rows that are away from home are pulled
// into marked places nearer to it, which lets more marks go; two rounds leave few (DeviceMemory.tidy):
//
//     note_away, free_marks, then twice: pull_rows, drop_copied, note_away, free_marks

// Notes the rows that are not in their home bucket, one bit each, and the buckets they passed on the way from
// it: a free place there would hide them.
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

// Copies rows that are not in their home bucket to marked places nearer to it; `drop_copied` removes the
// originals. Only rows noted by `note_away` move: a row that another thread is just copying may be
// incomplete.
extern "C" __global__ void pull_rows(u64* keys, u64 buckets, const u32* __restrict__ away, u32* row_times,
                                     u32* values, u32* states, u8* flags, int* stamps, Widths words) {
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
    if (stamps != nullptr) stamps[to] = stamps[place];
  }
  if (__ballot_sync(0xffffffffu, to >= 0) != 0)
    copy_rows(values, states, values, states, words, (i64)place, to);
}

// Marks the old places of copied rows: `find` returns the copy, which is nearer to the home bucket. A
// separate launch, since until all copies are complete the originals are the only valid rows.
extern "C" __global__ void drop_copied(u64* keys, u64 buckets, int* stamps) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= buckets * KEYS) return;
  const u64 hash = __ldcg(&keys[place]);
  if (hash <= MARK || (u64)find(keys, buckets, hash) == place) return;
  keys[place] = MARK;
  if (stamps != nullptr) stamps[place] = 0;  // of no batch: the next row here has not been used yet
}
