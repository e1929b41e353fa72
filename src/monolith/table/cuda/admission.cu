// Admission filters in device memory: which ids of a batch must wait for their row.
//
// They count, and draw, what `sliding_filter.h` and `probabilistic_filter.h` do in host memory, in the order
// of the batch and to the bit. One block asks the filter of one table:
//
//     join       ids without a row, each once: a group, numbered by its slot in a small hash table
//     ask        groups in the order of first sight, as far as that matters
//     tell       every position of a group that waits
//
// What a sliding filter says of an id depends on the cells near the id's position alone. So groups are asked
// at the same time if they are far apart: in each round a group reserves the regions of its cells, and those
// that no earlier group has reserved are asked. Only where the newest block of the filter may become full in
// this batch (the next one is wiped then) are they asked one by one.
#pragma once

#include "cells.cuh"

using u16 = unsigned short;

#define PROBES 16  // cells that an id looks at, in each block: as in sliding_filter.h
#define MOST 15    // where counts end
#define FORWARD \
  2  // blocks that new ids are counted in: the newest, and the next one for those it has no cell for
#define NO_SLOT (-1)
#define INTS 10  // of memory to work in, for each id of a batch; as in filters.py

// A filter; filters.py fills it in.
struct Filter {
  u16* cells;  // block after block; null for a filter that draws
  u64* meta;
  const u32* by_slot;  // thresholds, or null
  u64 threshold;       // of slots without one
  u64 blocks;
  u64 stride;    // cells of a block
  u64 total;     // positions: those that ids begin to look at
  u64 capacity;  // ids of a block
  u64 origin;    // of draws
  u64 equal;     // whether each sighting has the same chance

  __device__ u32 threshold_of(i64 id) const {
    return by_slot != nullptr ? by_slot[slot_of(id)] : (u32)threshold;
  }
};
static_assert(sizeof(Filter) == 80, "as in filters.py");

// What a filter keeps next to its cells: cells in use by block follow ELEMENTS.
enum Meta { HEAD, ADVANCES, FAILURES, ELEMENTS, DRAWS = 0 };

enum Answer { OPEN, WAITS, ADMITTED, NEW = 4 };  // of a group; NEW in the round it was asked in

// The ids of one table in a batch, in memory of their own to work in: arrays by slot have `slots` numbers.
struct Asked {
  const i64* ids;
  int n;
  i64 real;           // of them; what follows pads the batch and is no sighting
  const u8* skip;     // or null
  const i64* counts;  // sightings of each; null for one each
  bool together;      // whether equal ids are one sighting, which counts for the sum
  int slots;
  int* owner;    // a position with the slot's id
  int* first;    // the first of them
  int* reserve;  // by region: the first group that wants it
  int* answer;
  int* group;  // by position: its slot, or NO_SLOT
  int* list;   // the slots in use
  u64* sums;   // sightings

  __device__ u64 sighted(int i) const { return i >= real ? 0 : counts != nullptr ? (u64)counts[i] : 1; }
};

// The cell in a block that has the signature or is free for it, or null.
__device__ __forceinline__ u16* find_cell(const Filter& filter, u64 block, u64 position, u32 signature) {
  u16* const cells = filter.cells + block * filter.stride + position;
  for (int i = 0; i < PROBES; ++i)
    if (cells[i] == 0 || cells[i] >> 4 == signature) return cells + i;
  return nullptr;
}

__device__ __forceinline__ u64 position_of(const Filter& filter, i64 id) {
  return mix((u64)id) % filter.total;
}

// Counts sightings of an id, and returns whether it must wait. `fresh` is set if that took a free cell.
__device__ inline bool count_sightings(const Filter& filter, i64 id, u64 sightings, bool& fresh) {
  const u64 position = position_of(filter, id);
  const u32 signature = (u32)((u64)id >> 17 | (u64)id << 15) & 0xfff;
  const u32 threshold = filter.threshold_of(id);
  const u64 head = filter.meta[HEAD];
  u64 block = 0;
  u16* cell = nullptr;
  for (u64 step = 0; step < FORWARD && cell == nullptr; ++step) {
    block = (head + step) % filter.blocks;
    cell = find_cell(filter, block, position, signature);
  }
  if (cell == nullptr) {
    atomicAdd(&filter.meta[FAILURES], 1ULL);
    return MOST < threshold;
  }
  u32 before = *cell & MOST;
  fresh = *cell == 0 && sightings > 0;
  if (*cell == 0) {
    const u64 older = min(filter.meta[ADVANCES], filter.blocks - FORWARD);
    for (u64 step = 1; step <= older; ++step) {
      const u16* const known =
          find_cell(filter, (head + filter.blocks - step) % filter.blocks, position, signature);
      if (known != nullptr && *known != 0) {
        before = *known & MOST;
        break;
      }
    }
  }
  if (sightings > 0) {
    if (fresh) atomicAdd(&filter.meta[ELEMENTS + block], 1ULL);
    *cell = (u16)(signature << 4 | (u32)min((u64)MOST, before + min((u64)MOST, sightings)));
  }
  return before < threshold;
}

// Draws whether an id must wait, by the number of its draw.
__device__ inline bool draw_waits(const Filter& filter, i64 id, u64 sightings, u64 number) {
  const u64 bits = mix(filter.origin + number * 0x9e3779b97f4a7c15ULL);
  const double uniform = (double)(bits >> 11) * 0x1p-53;
  const double share = (double)min(sightings, 0xffffffffULL) / filter.threshold_of(id);
  return uniform >= (filter.equal ? 1 - pow(0.05, share) : min(1.0, share));
}

// Whether the newest block is full once it has so many cells more in use.
__device__ __forceinline__ bool fills(const Filter& filter, u64 more) {
  return min(filter.capacity, filter.meta[ELEMENTS + filter.meta[HEAD]] + more) + 1 >= filter.capacity;
}

__device__ __forceinline__ int* region_of(const Asked& asked, u64 position, int next) {
  return &asked.reserve[(position / PROBES + next) % asked.slots];
}

// Finds the groups; returns how many there are. `repeated` is set if one has several positions.
__device__ inline int join(const Filter& filter, const u64* keys, u64 buckets, const Asked& asked,
                           int& repeated) {
  __shared__ int groups, repeats;
  for (int i = threadIdx.x; i < asked.slots; i += blockDim.x) {
    asked.owner[i] = NO_SLOT;
    asked.first[i] = asked.reserve[i] = NONE;
    asked.answer[i] = OPEN;
    asked.sums[i] = 0;
  }
  if (threadIdx.x == 0) groups = repeats = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < asked.n; i += blockDim.x) {
    const i64 id = asked.ids[i];
    const u64 hash = mix((u64)id);
    int at = NO_SLOT;
    if ((asked.skip == nullptr || asked.skip[i] == 0) && filter.threshold_of(id) > 0 &&
        find(keys, buckets, hash) == NONE) {
      at = (int)(hash % (u64)asked.slots);
      for (;;) {
        const int owner = atomicCAS(&asked.owner[at], NO_SLOT, i);
        if (owner == NO_SLOT) asked.list[atomicAdd(&groups, 1)] = at;
        if (owner == NO_SLOT) break;
        if (asked.ids[owner] == id) {
          repeats = 1;
          break;
        }
        if (++at == asked.slots) at = 0;
      }
      atomicMin(&asked.first[at], i);
      atomicAdd(&asked.sums[at], asked.sighted(i));
    }
    asked.group[i] = at;
  }
  __syncthreads();
  repeated = repeats;
  return groups;
}

// Asks a sliding filter about all groups, those that are near to each other in the order of first sight.
__device__ inline void ask_apart(const Filter& filter, const Asked& asked, int groups) {
  int more;
  do {
    for (int i = threadIdx.x; i < groups; i += blockDim.x) {
      const int at = asked.list[i], first = asked.first[at];
      if (asked.answer[at] != OPEN) continue;
      const u64 position = position_of(filter, asked.ids[first]);
      atomicMin(region_of(asked, position, 0), first);
      atomicMin(region_of(asked, position, 1), first);
    }
    __syncthreads();
    more = 0;
    for (int i = threadIdx.x; i < groups; i += blockDim.x) {
      const int at = asked.list[i], first = asked.first[at];
      if (asked.answer[at] != OPEN) continue;
      const u64 position = position_of(filter, asked.ids[first]);
      if (*region_of(asked, position, 0) != first || *region_of(asked, position, 1) != first) {
        more = 1;
        continue;
      }
      bool fresh = false;
      asked.answer[at] =
          NEW | (count_sightings(filter, asked.ids[first], asked.sums[at], fresh) ? WAITS : ADMITTED);
    }
    more = __syncthreads_or(more);
    for (int i = threadIdx.x; i < groups; i += blockDim.x) {
      const int at = asked.list[i];
      if (asked.answer[at] != OPEN && (asked.answer[at] & NEW) == 0) continue;
      asked.answer[at] &= ~NEW;
      const u64 position = position_of(filter, asked.ids[asked.first[at]]);
      *region_of(asked, position, 0) = *region_of(asked, position, 1) = NONE;
    }
    __syncthreads();
  } while (more);
}

// Asks a sliding filter about one sighting after another.
//
// A group is one sighting if they count together. Otherwise each position is one, until the id is admitted:
// `group` becomes NO_SLOT where it does not wait.
__device__ inline void ask_in_turn(const Filter& filter, const Asked& asked) {
  __shared__ i64 wiped;
  int next = 0;
  do {
    if (threadIdx.x == 0) {
      wiped = -1;
      while (next < asked.n && wiped < 0) {
        const int i = next++, at = asked.group[i];
        if (at == NO_SLOT) continue;
        if (asked.together && asked.first[at] != i) continue;
        bool waits = false, fresh = false;
        if (asked.answer[at] != ADMITTED) {
          const u64 sightings = asked.together ? asked.sums[at] : asked.sighted(i);
          waits = filter.cells != nullptr ? count_sightings(filter, asked.ids[i], sightings, fresh)
                                          : draw_waits(filter, asked.ids[i], sightings, filter.meta[DRAWS]++);
          asked.answer[at] = waits ? WAITS : ADMITTED;
        }
        if (!asked.together && !waits) asked.group[i] = NO_SLOT;
        if (!fresh || !fills(filter, 0)) continue;
        const u64 head = (filter.meta[HEAD] + 1) % filter.blocks;
        filter.meta[HEAD] = head;
        ++filter.meta[ADVANCES];
        wiped = (i64)((head + 1) % filter.blocks);
      }
    }
    __syncthreads();
    if (wiped < 0) return;
    for (u64 i = threadIdx.x; i < filter.stride; i += blockDim.x)
      filter.cells[(u64)wiped * filter.stride + i] = 0;
    if (threadIdx.x == 0) filter.meta[ELEMENTS + wiped] = 0;
    __syncthreads();
  } while (true);
}

// Draws for all groups at once: the number of a draw is the group's place in the order of first sight.
__device__ inline void draw_together(const Filter& filter, const Asked& asked, int groups) {
  __shared__ int before[1024];
  const int each = (asked.n + (int)blockDim.x - 1) / (int)blockDim.x;
  const int begin = min((int)threadIdx.x * each, asked.n), end = min(begin + each, asked.n);
  int firsts = 0;
  for (int i = begin; i < end; ++i) firsts += asked.group[i] != NO_SLOT && asked.first[asked.group[i]] == i;
  before[threadIdx.x] = firsts;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < (int)blockDim.x; ++i) {
      const int own = before[i];
      before[i] = sum;
      sum += own;
    }
  }
  __syncthreads();
  u64 number = filter.meta[DRAWS] + (u64)before[threadIdx.x];
  for (int i = begin; i < end; ++i) {
    const int at = asked.group[i];
    if (at == NO_SLOT || asked.first[at] != i) continue;
    asked.answer[at] = draw_waits(filter, asked.ids[i], asked.sums[at], number++) ? WAITS : ADMITTED;
  }
  __syncthreads();
  if (threadIdx.x == 0) filter.meta[DRAWS] += (u64)groups;
}

// Asks about the ids of one table, by a whole block. `skip` and the answers go to `out`.
__device__ inline void ask(const Filter& filter, const u64* keys, u64 buckets, u64* counters,
                           const Asked& asked, u8* out) {
  int repeated;
  const int groups = join(filter, keys, buckets, asked, repeated);
  const bool sums = asked.together || !repeated;
  const bool in_turn = !sums || (filter.cells != nullptr && fills(filter, (u64)groups));
  __syncthreads();  // all have read the filter before one changes it
  if (in_turn)
    ask_in_turn(filter, asked);
  else if (filter.cells != nullptr)
    ask_apart(filter, asked, groups);
  else
    draw_together(filter, asked, groups);
  __syncthreads();
  u64 filtered = 0;
  for (int i = threadIdx.x; i < asked.n; i += blockDim.x) {
    const int at = asked.group[i];
    const bool waits = at != NO_SLOT && (!sums || asked.answer[at] == WAITS);
    if (waits) filtered += asked.sighted(i);
    out[i] = (u8)((asked.skip != nullptr ? asked.skip[i] : 0) | (waits ? TURNED_AWAY : 0));
  }
  if (filtered > 0) atomicAdd(&counters[FILTERED], filtered);
}

// The arrays that a table with the ids from `from` on works in.
__device__ __forceinline__ Asked asked_of(const i64* ids, i64 from, int n, int* ints, u64* sums) {
  Asked asked;
  ints += INTS * from;
  asked.ids = ids + from;
  asked.n = n;
  asked.real = n;
  asked.skip = nullptr;
  asked.counts = nullptr;
  asked.together = true;
  asked.slots = 2 * n;
  asked.owner = ints;
  asked.first = ints + 2 * n;
  asked.reserve = ints + 4 * n;
  asked.answer = ints + 6 * n;
  asked.group = ints + 8 * n;
  asked.list = ints + 9 * n;
  asked.sums = sums + 2 * from;
  return asked;
}

extern "C" __global__ void ask_filter(Filter filter, const u64* keys, u64 buckets, u64* counters,
                                      const i64* ids, int n, const u8* skip, const i64* counts, int together,
                                      int* ints, u64* sums, u8* out) {
  Asked asked = asked_of(ids, 0, n, ints, sums);
  asked.skip = skip;
  asked.counts = counts;
  asked.together = together != 0;
  ask(filter, keys, buckets, counters, asked, out);
}

// The same for many tables, a block for each cell. `real` is by table.
//
// `refused` is not 0 if the batch must leave no trace (`verdict.cu`): nothing is counted.
extern "C" __global__ void ask_filters(const Arrays* tables, const __grid_constant__ Cells cells,
                                       const Filter* filters, const i64* ids, const i64* real, int* ints,
                                       u64* sums, u8* out, const i64* refused) {
  const Cell& cell = cells.at[blockIdx.x];
  if (*refused != 0) return;
  const Arrays table = tables[cell.table];
  Asked asked = asked_of(ids, cell.ids, cell.size, ints, sums);
  asked.real = real[cell.table];
  ask(filters[cell.table], table.keys, table.buckets, table.counters, asked, out + cell.ids);
}
