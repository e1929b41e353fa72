// How the rows of many tables of one layout are read at once: `rows.cu` and `cells.cuh` stand before it.

#define PACES (1024 / (int)sizeof(Scalars) < 1 ? 1 : 1024 / (int)sizeof(Scalars))

// By cell, in the order of cells.
struct StepScalars {
  Scalars at[PACES < CELLS ? PACES : CELLS];
};

// A tile of 16 threads to a unit of TOGETHER ids.
extern "C" __global__ void lookup_tables(const Table* __restrict__ tables, const __grid_constant__ Cells cells,
                                         const __grid_constant__ StepScalars paces, const i64* __restrict__ ids,
                                         float* __restrict__ out) {
  const int tiles = (int)(gridDim.x * blockDim.x / KEYS);
  for (int unit = (int)((blockIdx.x * blockDim.x + threadIdx.x) / KEYS); unit < cells.units; unit += tiles) {
    const int number = cells.of(unit);
    const Cell& cell = cells.at[number];
    const Table table = tables[cell.table];
    look_up(table, ids + cell.ids, (i64)(unit - cell.begin) * TOGETHER, cell.size, paces.at[number],
            out + cell.shift);
  }
}
