// The index of a table in device memory: which place a row has, by the hash of its id.
//
// Keys are hashes (hash.h) in buckets of 16, 128 bytes each, and a row lies at the place of its key. The home
// of a hash is a bucket by its leading bits; where that has no free place the next one follows, and so on, so
// that a hash is in the first bucket with a free place at the latest. That holds by bucket, not by place: a
// place may become free again wherever its bucket has a free one already, and is marked otherwise. Two hashes
// mean something else as keys, free and marked: their ids have places of their own behind the buckets.
//
// Kernels that claim never run at the same time as kernels that drop: the table launches them one after
// another on one stream.

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
enum Counter { USED, MARKS, INSERTED, NON_FINITE, NEWEST, FOUND, BAD_TIMES };

// Why a position of a batch is skipped.
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

// The place of a hash, which is given one where it has none. Threads with equal hashes go through a bucket in
// one order and each takes the first free place of it, so that one of them takes it for all: while this runs
// a place that is taken stays taken. Caches next to the processors may be behind, so loads go past them.
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
      from = open + 1;
    }
    if (++bucket == buckets) bucket = 0;
  }
  return NONE;
}

// Takes the row from a place; false when another thread has.
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

// Adds up what each thread of a warp says, into a counter. Every thread of the warp calls it.
__device__ __forceinline__ void count(u64* counter, bool one) {
  const u32 ones = __ballot_sync(0xffffffffu, one);
  if ((threadIdx.x & 31) == 0 && ones != 0) atomicAdd(counter, (u64)__popc(ones));
}
