// Kernels that train the rows of many tables of one layout at once.
#pragma once

#include "fused_rows.cu"
#include "train.cu"

// The part of a batch that one table has. Positions in `order` count from the start of the whole batch,
// although tables before this one may have other widths. So `Cell::shift` makes up for it: gradients + shift
// + position * DIM is the gradient of a position.
__device__ __forceinline__ Writes writes_of(const Writes& writes, const Cell& cell) {
  return {
      writes.places + cell.ids, writes.order + cell.ids, cell.size, writes.made, writes.times, writes.time};
}

// Sums of long runs are stored by stretch of the whole batch. Stretches of a cell are counted from its own
// first id, and a cell has size / STRETCH of them, so no two cells share one.
__device__ __forceinline__ i64 first_stretch(const Cell& cell) {
  return cell.ids / STRETCH;
}

// One block per stretch of a cell.
extern "C" __global__ void sum_long_runs_of_tables(const __grid_constant__ Cells cells, Writes writes,
                                                   const float* __restrict__ gradients,
                                                   LongRun* __restrict__ runs, float* __restrict__ sums) {
  const Cell& cell = cells.at[cells.of((int)blockIdx.x)];
  const i64 from = first_stretch(cell);
  sum_long_run(writes_of(writes, cell), gradients + cell.shift, runs + from, sums + from * DIM,
               (i64)blockIdx.x - cell.begin);
}

// What changes from step to step, in device memory, for launches that are captured once and replayed: their
// parameters cannot change. Pointers are null for launches that are made anew for every step.
struct Live {
  const CellScalars* scalars;
  const i64* step;
};
static_assert(sizeof(Live) == 16, "as in fused.py");

template <bool CHECKED>
__device__ __forceinline__ void train_cells(const Table* __restrict__ tables, const Cells& cells,
                                            const CellScalars& given, const Writes& writes,
                                            const float* gradients, const float* latest, i64 step,
                                            const LongRun* runs, const float* sums, int summed, int per_tile,
                                            const Live& live) {
  const int unit = (int)TILE_NUMBER;
  if (unit >= cells.units) return;
  const int number = cells.of(unit);
  const Cell& cell = cells.at[number];
  const Table table = tables[cell.table];
  const i64 from = first_stretch(cell);
  if (live.step != nullptr) step = *live.step;
  const Scalars& scalars = live.scalars != nullptr ? live.scalars->at[number] : given.at[number];
  train<CHECKED>(table, writes_of(writes, cell), gradients + cell.shift,
                 latest != nullptr ? latest + cell.shift : nullptr, scalars, step, runs + from,
                 sums + from * DIM, summed, per_tile, unit - cell.begin);
}

// One tile per unit of `per_tile` positions.
extern "C" __global__ void __launch_bounds__(256, TRAIN_BLOCKS)
    train_tables(const Table* __restrict__ tables, const __grid_constant__ Cells cells,
                 const __grid_constant__ CellScalars scalars, Writes writes,
                 const float* __restrict__ gradients, const float* __restrict__ latest, i64 step,
                 const LongRun* __restrict__ runs, const float* __restrict__ sums, int summed, int per_tile,
                 Live live) {
  train_cells<false>(tables, cells, scalars, writes, gradients, latest, step, runs, sums, summed, per_tile,
                     live);
}

extern "C" __global__ void train_tables_checked(
    const Table* __restrict__ tables, const __grid_constant__ Cells cells,
    const __grid_constant__ CellScalars scalars, Writes writes, const float* __restrict__ gradients,
    const float* __restrict__ latest, i64 step, const LongRun* __restrict__ runs,
    const float* __restrict__ sums, int summed, int per_tile, Live live) {
  train_cells<true>(tables, cells, scalars, writes, gradients, latest, step, runs, sums, summed, per_tile,
                    live);
}
