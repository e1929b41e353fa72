// Many tables in one launch: which of them a thread works for.
//
// A batch over many tables is one array, table after table: the ids of one are a cell. The work of a kernel
// is divided into units (a warp, a tile, a block) such that none has work of two cells, and a cell is found
// by the number of a unit. Everything comes with the launch, so nothing has to be copied for it first.

#pragma once

#include "places.cuh"

#define CELLS 96  // of a launch: its parameters are 4 KB at most

struct Cell {
  i64 shift;  // what its floats begin at, or what is added to its places
  int ids;    // what its ids begin at
  int size;   // how many there are
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
