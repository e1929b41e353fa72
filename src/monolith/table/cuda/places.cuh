// The index of a table in device memory: which place a row has, by the hash of its id.
//
//   bucket 0            bucket 1           ...   bucket B-1          extra
//   | 16 keys, 128 B |  | 16 keys, 128 B |       | 16 keys, 128 B |  | 2 keys |     place = index of a key
//
// Keys are hashes (hash.h) in buckets of 16, and a row is stored at the place of its key: `values`, `states`
// and `times` are arrays by place. The home of a hash is a bucket by its leading bits. If that has no free
// place, the next bucket is tried, and so on.
//
// Invariant: a hash is never stored beyond the first bucket, counted from its home, that has a FREE place. So
// a search stops at the first bucket with a free place. The invariant is by bucket, not by place: a dropped
// place becomes FREE only if its bucket has a free place already; otherwise it is marked (MARK), since a free
// place there would hide rows that were stored further on. Marks are used again by `claim_absent`, or cleared
// by `note_away`, `free_marks` and `pull_rows`.
//
// The hashes 0 and 1 mean FREE and MARK as keys, so their ids have two places of their own behind the
// buckets.
//
// Order. Kernels that claim never run at the same time as kernels that drop: the table launches them one
// after another on one stream. Within a launch, all writes to a key are atomic, and a key that was taken
// stays taken. That is all the order there is: rows are written by later launches, which see everything of
// earlier ones.

#pragma once

#include "hash.h"

using namespace monolith;

#define FREE 0ULL
#define MARK 1ULL
#define HELD 2ULL  // the key of a place behind the buckets that has a row
#define NONE 0x7fffffff
#define KEYS 16         // of a bucket
#define EXTRA_PLACES 2  // places behind the buckets

// What a table counts on the device, in this order.
enum Counter { USED, MARKS, INSERTED, NON_FINITE, NEWEST, FOUND, BAD_TIMES, FILTERED };

// Why a position of a batch is skipped: bits, as in memory.py.
enum Skip { UNUSABLE = 1, TURNED_AWAY = 2, ELSEWHERE = 4 };

// The arrays of a table.
struct Arrays {
  u64* keys;
  u64 buckets;
  u32* times;
  u8* values;
  float* states;
  u64* counters;
};
static_assert(sizeof(Arrays) == 48, "as in memory.py");

__device__ __forceinline__ u64 hash_at(const u64* keys, u64 buckets, u64 place) {
  return place < buckets * KEYS ? keys[place] : place - buckets * KEYS;
}

__device__ __forceinline__ bool held_at(const u64* keys, u64 buckets, u64 place) {
  return place < buckets * KEYS ? keys[place] > MARK : keys[place] != FREE;
}

// The place of a hash, or NONE. The starting position within the bucket comes from the low bits, so that rows
// of one bucket do not all compete for its first place. Reads may come from a cache that misses claims of the
// same launch: NONE is final only if no kernel claims meanwhile.
__device__ __forceinline__ int find(const u64* keys, u64 buckets, u64 hash) {
  if (hash <= MARK) {
    const u64 place = buckets * KEYS + hash;
    return keys[place] != FREE ? (int)place : NONE;
  }
  u64 bucket = __umul64hi(hash, buckets);
  const int start = (int)(hash & (KEYS - 1));
  for (u64 seen = 0; seen < buckets; ++seen) {
    bool open = false;
    for (int j = 0; j < KEYS; ++j) {
      const u64 place = bucket * KEYS + ((start + j) & (KEYS - 1));
      const u64 key = keys[place];
      if (key == hash) return (int)place;
      open |= key == FREE;
    }
    if (open) return NONE;
    if (++bucket == buckets) bucket = 0;
  }
  return NONE;
}

// The place of a hash; takes a free one if it has none. `fresh` is set for the one thread that took it.
//
// Threads with equal hashes search a bucket in the same order, and each tries the first free place in it.
// Only one compare-and-swap succeeds; the other threads read the winner's key from it and return the same
// place. This is correct because a place that is taken stays taken while claims run. The L1 cache may be
// stale, so loads go to L2 (__ldcg).
__device__ __forceinline__ int claim(u64* keys, u64 buckets, u64 hash, bool& fresh) {
  if (hash <= MARK) {
    const u64 place = buckets * KEYS + hash;
    fresh = atomicCAS(&keys[place], FREE, HELD) == FREE;
    return (int)place;
  }
  u64 bucket = __umul64hi(hash, buckets);
  const int start = (int)(hash & (KEYS - 1));
  for (u64 seen = 0; seen < buckets; ++seen) {
    for (int from = 0;;) {
      int open = -1;
      for (int j = from; j < KEYS; ++j) {
        const u64 place = bucket * KEYS + ((start + j) & (KEYS - 1));
        const u64 key = __ldcg(&keys[place]);
        if (key == hash) return (int)place;
        if (key == FREE && open < 0) open = j;
      }
      if (open < 0) break;
      const u64 place = bucket * KEYS + ((start + open) & (KEYS - 1));
      const u64 key = atomicCAS(&keys[place], FREE, hash);
      fresh = key == FREE;
      if (fresh || key == hash) return (int)place;
      from = open + 1;  // another hash won this place; the ones before it were taken already
    }
    if (++bucket == buckets) bucket = 0;
  }
  return NONE;
}

// Drops the row at a place; false if another thread already has. The bucket's free places cannot be taken
// meanwhile, since no claim runs: `open` stays true once it is. Two threads that drop in a bucket without a
// free place both mark theirs, which is safe.
__device__ __forceinline__ bool drop(u64* keys, u64 buckets, u64 place, u64* counters) {
  if (place >= buckets * KEYS) {
    if (atomicCAS(&keys[place], HELD, FREE) != HELD) return false;
    atomicAdd(&counters[USED], (u64)0 - 1ULL);
    return true;
  }
  const u64 hash = __ldcg(&keys[place]);
  if (hash <= MARK) return false;
  const u64 first = place / KEYS * KEYS;
  bool open = false;
  for (int j = 0; j < KEYS; ++j) open |= __ldcg(&keys[first + j]) == FREE;
  if (atomicCAS(&keys[place], hash, open ? FREE : MARK) != hash) return false;
  if (open)
    atomicAdd(&counters[USED], (u64)0 - 1ULL);
  else
    atomicAdd(&counters[MARKS], 1ULL);
  return true;
}

// Adds the number of threads for which `one` holds to a counter, with one atomic per warp. Every thread of
// the warp must call it.
__device__ __forceinline__ void count(u64* counter, bool one) {
  const u32 ones = __ballot_sync(0xffffffffu, one);
  if ((threadIdx.x & 31) == 0 && ones != 0) atomicAdd(counter, (u64)__popc(ones));
}
