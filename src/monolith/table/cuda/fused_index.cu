// Kernels over the indices of many tables at once.
//
// One sort brings the rows of all tables into the order in which they are trained. The sort key of an id is
// its place plus the number of keys of all tables before its own (`Cell::shift`):
//
//     keys   | table 0: P0 places, 1 for ids without a place | table 1: P1 places, 1 | ...

#pragma once

#include "cells.cuh"
#include "index.cu"

#define MAX_TIME 0xffffffffLL

// One warp per unit, one thread per id: `i` is the id's number in its cell, `at` its position in the batch.
// Whole warps return together, so that warp-wide calls below have all their lanes.
#define OF_WARP                                                              \
  const int unit = (int)(((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32); \
  if (unit >= cells.units) return;                                           \
  const Cell& cell = cells.at[cells.of(unit)];                               \
  const int i = (unit - cell.begin) * 32 + (int)(threadIdx.x & 31);          \
  const bool there = i < cell.size;                                          \
  const int at = cell.ids + (there ? i : 0);

// Claims a place for every id. The clocks of tables are advanced later, by the steps, which know the
// gradients that are not usable. An event time that no row can hold counts as 0 and is counted in BAD_TIMES;
// the host raises when it next reads the counters. `places` is for tables that track changes, or null.
//
// `refused` is null, or not 0 if the batch must leave no trace (`verdict.cu`). Then no id gets a place, and
// every later kernel of the step finds nothing to do.
template <class Key>
__device__ __forceinline__ void claim_cells(const Arrays* __restrict__ tables, const Cells& cells,
                                            const i64* __restrict__ ids, const i64* __restrict__ seconds,
                                            u32 time, Key* __restrict__ order, u8* __restrict__ made,
                                            u32* __restrict__ times, int* __restrict__ places,
                                            const i64* __restrict__ refused) {
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
  const bool applied = refused == nullptr || *refused == 0;
  const int place =
      claim_one(table.keys, table.buckets, table.counters, there && applied, ids[at], 0, 0, fresh);
  if (there) {
    order[at] = (Key)(cell.shift + (place == NONE ? (i64)table.buckets * KEYS + EXTRA_PLACES : (i64)place));
    made[at] = fresh;
    if (places != nullptr) places[at] = place;
  }
}

// Turns sorted keys back into places.
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
                                        int* __restrict__ places, const i64* __restrict__ refused) {
  claim_cells(tables, cells, ids, seconds, time, order, made, times, places, refused);
}

extern "C" __global__ void settle_tables(const Arrays* __restrict__ tables,
                                         const __grid_constant__ Cells cells, const int* __restrict__ order,
                                         int* __restrict__ places) {
  settle_cells(tables, cells, order, places);
}

// The same for keys of 64 bits: the tables together have more than 2^31 places. Such a sort takes twice as
// long.
extern "C" __global__ void claim_tables_wide(const Arrays* __restrict__ tables,
                                             const __grid_constant__ Cells cells, const i64* __restrict__ ids,
                                             const i64* __restrict__ seconds, u32 time,
                                             i64* __restrict__ order, u8* __restrict__ made,
                                             u32* __restrict__ times, int* __restrict__ places,
                                             const i64* __restrict__ refused) {
  claim_cells(tables, cells, ids, seconds, time, order, made, times, places, refused);
}

extern "C" __global__ void settle_tables_wide(const Arrays* __restrict__ tables,
                                              const __grid_constant__ Cells cells,
                                              const i64* __restrict__ order, int* __restrict__ places) {
  settle_cells(tables, cells, order, places);
}

// Collects the counters of all tables, so that one copy brings them to the host; zeros for absent tables.
extern "C" __global__ void collect_counters(const Arrays* __restrict__ tables, int n, int counters,
                                            u64* __restrict__ out) {
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n * counters) return;
  const u64* const own = tables[i / counters].counters;
  out[i] = own != nullptr ? own[i % counters] : 0;
}
