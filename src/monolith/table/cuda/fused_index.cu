// Kernels over the indices of many tables at once.
//
// Rows of all tables are brought into one order by one sort: a key is a place, and before it come all places
// of the tables before. Behind the places of a table there is one more key, for ids that have none.

#pragma once

#include "cells.cuh"
#include "index.cu"

#define MAX_TIME 0xffffffffLL

// The position of this thread's id in its cell, one warp to a unit.
#define OF_WARP                                                              \
  const int unit = (int)(((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32); \
  if (unit >= cells.units) return;                                           \
  const Cell& cell = cells.at[cells.of(unit)];                               \
  const int i = (unit - cell.begin) * 32 + (int)(threadIdx.x & 31);          \
  const bool there = i < cell.size;                                          \
  const int at = cell.ids + (there ? i : 0);

// Gives every id its place; the clocks of tables are moved on by the steps. Event times that no row can keep
// count as 0, and are counted. `places` are for tables that track changes, or null.
template <class Key>
__device__ __forceinline__ void claim_cells(const Arrays* __restrict__ tables, const Cells& cells,
                                            const i64* __restrict__ ids, const i64* __restrict__ seconds,
                                            u32 time, Key* __restrict__ order, u8* __restrict__ made,
                                            u32* __restrict__ times, int* __restrict__ places) {
  OF_WARP
  if (cell.table < 0) {
    if (there) order[at] = (Key)cell.shift;
    return;
  }
  const Arrays table = tables[cell.table];
  if (seconds != nullptr) {
    const i64 second = seconds[at];
    const bool wrong = second < 0 || second > MAX_TIME;
    time = wrong ? 0 : (u32)second;
    count(&table.counters[BAD_TIMES], there && wrong);
    if (there) times[at] = time;
  }
  bool fresh;
  const int place = claim_one(table.keys, table.buckets, table.counters, there, ids[at], 0, 0, fresh);
  if (there) {
    order[at] = (Key)(cell.shift + (place == NONE ? (i64)table.buckets * KEYS + EXTRA_PLACES : (i64)place));
    made[at] = fresh;
    if (places != nullptr) places[at] = place;
  }
}

// Makes places of sorted keys.
template <class Key>
__device__ __forceinline__ void settle_cells(const Arrays* __restrict__ tables, const Cells& cells,
                                             const Key* __restrict__ order, int* __restrict__ places) {
  OF_WARP
  if (cell.table < 0 || !there) return;
  const i64 place = (i64)order[at] - cell.shift;
  places[at] = place == (i64)tables[cell.table].buckets * KEYS + EXTRA_PLACES ? NONE : (int)place;
}

extern "C" __global__ void claim_tables(const Arrays* __restrict__ tables,
                                        const __grid_constant__ Cells cells, const i64* __restrict__ ids,
                                        const i64* __restrict__ seconds, u32 time, int* __restrict__ order,
                                        u8* __restrict__ made, u32* __restrict__ times,
                                        int* __restrict__ places) {
  claim_cells(tables, cells, ids, seconds, time, order, made, times, places);
}

extern "C" __global__ void settle_tables(const Arrays* __restrict__ tables,
                                         const __grid_constant__ Cells cells, const int* __restrict__ order,
                                         int* __restrict__ places) {
  settle_cells(tables, cells, order, places);
}

// The same for so many places that their numbers need 64 bits.
extern "C" __global__ void claim_tables_wide(const Arrays* __restrict__ tables,
                                             const __grid_constant__ Cells cells, const i64* __restrict__ ids,
                                             const i64* __restrict__ seconds, u32 time,
                                             i64* __restrict__ order, u8* __restrict__ made,
                                             u32* __restrict__ times, int* __restrict__ places) {
  claim_cells(tables, cells, ids, seconds, time, order, made, times, places);
}

extern "C" __global__ void settle_tables_wide(const Arrays* __restrict__ tables,
                                              const __grid_constant__ Cells cells,
                                              const i64* __restrict__ order, int* __restrict__ places) {
  settle_cells(tables, cells, order, places);
}

// Brings the counters of many tables together, zeros for those that are none.
extern "C" __global__ void collect_counters(const Arrays* __restrict__ tables, int n, int counters,
                                            u64* __restrict__ out) {
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n * counters) return;
  const u64* const own = tables[i / counters].counters;
  out[i] = own != nullptr ? own[i % counters] : 0;
}
