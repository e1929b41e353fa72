// Kernels that read the rows of many tables of one layout at once.
#pragma once

#include "cells.cuh"
#include "rows.cu"

#define SCALARS_PER_LAUNCH (1024 / (int)sizeof(Scalars) < 1 ? 1 : 1024 / (int)sizeof(Scalars))

// By cell, in the order of cells.
struct CellScalars {
  Scalars at[SCALARS_PER_LAUNCH < CELLS ? SCALARS_PER_LAUNCH : CELLS];
};

// A tile of 16 threads to a unit of TOGETHER ids.
extern "C" __global__ void lookup_tables(const Table* __restrict__ tables,
                                         const __grid_constant__ Cells cells,
                                         const __grid_constant__ CellScalars scalars,
                                         const i64* __restrict__ ids, float* __restrict__ out) {
  const int tiles = (int)(gridDim.x * blockDim.x / KEYS);
  for (int unit = (int)((blockIdx.x * blockDim.x + threadIdx.x) / KEYS); unit < cells.units; unit += tiles) {
    const int number = cells.of(unit);
    const Cell& cell = cells.at[number];
    const Table table = tables[cell.table];
    look_up(table, ids + cell.ids, (i64)(unit - cell.begin) * TOGETHER, cell.size, scalars.at[number],
            out + cell.shift);
  }
}
