// Kernels that read the rows of many tables of one layout at once.
#pragma once

#include "cells.cuh"
#include "rows.cu"

#define SCALARS_PER_LAUNCH (1024 / (int)sizeof(Scalars) < 1 ? 1 : 1024 / (int)sizeof(Scalars))

// The scalars of each cell's table: as many as fit next to the cells into the 4 KB of a launch's parameters.
struct CellScalars {
  Scalars at[SCALARS_PER_LAUNCH < CELLS ? SCALARS_PER_LAUNCH : CELLS];
};

// One tile of 16 threads per unit of TOGETHER ids; a tile takes several units if there are more than tiles.
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
