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
//
// `skip` is null, or by position not 0 for an id that must wait for its row (`admission.cu`).
template <class Key>
__device__ __forceinline__ void claim_cells(const Arrays* __restrict__ tables, const Cells& cells,
                                            const i64* __restrict__ ids, const i64* __restrict__ seconds,
                                            u32 time, Key* __restrict__ order, u8* __restrict__ made,
                                            u32* __restrict__ times, int* __restrict__ places,
                                            const i64* __restrict__ refused, const u8* __restrict__ skip) {
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
  const int place = claim_one(table.keys, table.buckets, table.counters, there && applied, ids[at],
                              skip != nullptr ? skip[at] : 0, 0, fresh);
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
                                        int* __restrict__ places, const i64* __restrict__ refused,
                                        const u8* __restrict__ skip) {
  claim_cells(tables, cells, ids, seconds, time, order, made, times, places, refused, skip);
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
                                             const i64* __restrict__ refused, const u8* __restrict__ skip) {
  claim_cells(tables, cells, ids, seconds, time, order, made, times, places, refused, skip);
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

// ---- rows that come from host memory -----------------------------------------------------------------

// What the kernels below know of a table; hot_rows.py fills it in.
struct Incoming {
  u64 values;   // where its first incoming row begins among all values, in words
  u64 states;   // the same among all states
  int* stamps;  // by place: the last batch that used the row, 0 for none
  Widths words;
};
static_assert(sizeof(Incoming) == 32, "as in hot_rows.py");

// Stamps the rows that a batch will use, as far as they are here, so that they stay until it was trained. The
// other ids are counted by table in `missing`, repeats too: the batch creates no more rows than that.
extern "C" __global__ void touch_tables(const Arrays* __restrict__ tables,
                                        const __grid_constant__ Cells cells,
                                        const Incoming* __restrict__ about, const i64* __restrict__ ids,
                                        int batch, u64* missing) {
  OF_WARP
  const Arrays& table = tables[cell.table];
  const int place = there ? find(table.keys, table.buckets, mix((u64)ids[at])) : NONE;
  if (place != NONE) about[cell.table].stamps[place] = batch;
  count(&missing[cell.table], there && place == NONE);
}

// Copies a part of a row for each lane with `to` >= 0; by 16 bytes at once if width and alignment allow it.
__device__ __forceinline__ void copy_part(const u32* source, u32* target, int words, i64 from, i64 to) {
  if (words % 4 == 0 && ((u64)source & 15) == 0)
    copy_words((const Four*)source, (Four*)target, words / 4, from, to);
  else
    copy_words(source, target, words, from, to);
}

// Takes in whole rows of distinct ids that have none here. They are no new rows, so INSERTED stays.
extern "C" __global__ void bring_tables(const Arrays* __restrict__ tables,
                                        const __grid_constant__ Cells cells,
                                        const Incoming* __restrict__ about, const i64* __restrict__ ids,
                                        const i64* __restrict__ times, const u32* __restrict__ values,
                                        const u32* __restrict__ states, int batch) {
  OF_WARP
  const Arrays table = tables[cell.table];
  const Incoming own = about[cell.table];
  bool was_free = false;
  bool was_marked = false;
  i64 to = -1;
  if (there) {
    to = claim_first(table.keys, table.buckets, mix((u64)ids[at]), was_free, was_marked);
    table.times[to] = (u32)times[at];
    own.stamps[to] = batch;
  }
  count_first(table.counters, was_free, was_marked);
  copy_part(values + own.values, (u32*)table.values, own.words.values, i, to);
  copy_part(states + own.states, (u32*)table.states, own.words.states, i, to);
}
