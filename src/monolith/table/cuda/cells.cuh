// Many tables in one launch: which of them a thread works for.
//
//   ids     | table 0, 70 ids      | table 1, 5 ids | table 2, 33 ids |
//   units   | 0      1      2      | 3              | 4       5       |     a warp of 32 ids each
//   cells     begin 0, ids 0         begin 3, ids 70  begin 4, ids 75
//
// A batch over many tables is one array, table after table; the ids of one table are a cell. The work of a
// kernel is divided into units (a warp, a tile or a block) such that no unit has work of two cells. A thread
// finds its cell by binary search for its unit. Cells are parameters of the launch, so nothing has to be
// copied to the device first.

#pragma once

#include "places.cuh"

#define CELLS 96  // of a launch: its parameters are 4 KB at most

struct Cell {
  i64 shift;  // position of its first float; for sort keys, the number of keys of all tables before it
  int ids;    // position of its first id
  int size;   // number of its ids
  int begin;  // its first unit
  int table;  // negative if the cell is skipped
};
static_assert(sizeof(Cell) == 24, "as in layout_groups.py");

struct Cells {
  int count;
  int units;
  Cell at[CELLS];

  // The last cell that begins at a unit or before; cells without units are skipped.
  __device__ int of(int unit) const {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (at[middle].begin <= unit)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
};
static_assert(sizeof(Cells) == 8 + CELLS * 24, "as in layout_groups.py");
