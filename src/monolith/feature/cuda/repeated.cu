// Rows of distinct ids as often as their ids occur, and the gradients of all occurrences back, summed.
//
// Both lie table after table. `numbers` has, for each occurrence, the number of its id among the distinct
// ones of all tables. Sums are taken in the order of the occurrences, so they do not depend on how threads
// run.

typedef long long i64;

// Where a table's rows lie.
struct Part {
  i64 floats;  // to its first occurrence
  i64 base;    // to where the row of distinct id 0 would lie, were all rows as wide
  int first;   // its first occurrence
  int number;  // its first distinct id
  int dim;
  int unused;
};

#define FLOATS 4  // that each thread does, a block apart

extern "C" __global__ void repeat(const Part* parts, int tables, const i64* numbers, const float* rows,
                                  i64 floats, float* out) {
  i64 at = (i64)blockIdx.x * blockDim.x * FLOATS + threadIdx.x;
  if (at >= floats) return;
  int low = 0;
  int high = tables;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (parts[middle].floats <= at)
      low = middle;
    else
      high = middle;
  }
#pragma unroll 1
  for (int k = 0; k < FLOATS && at < floats; ++k, at += blockDim.x) {
    while (low + 1 < tables && parts[low + 1].floats <= at) ++low;
    const Part part = parts[low];
    const unsigned within = (unsigned)(at - part.floats);
    const unsigned row = within / (unsigned)part.dim;
    const unsigned column = within - row * (unsigned)part.dim;
    out[at] = rows[part.base + numbers[part.first + (int)row] * part.dim + column];
  }
}

// `sorted` has the numbers in order: where those of each begin, with the end behind the last.
extern "C" __global__ void find_starts(const int* sorted, int occurrences, int distinct, int* starts) {
  const int at = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= occurrences) return;
  const int number = sorted[at];
  if (at == 0 || sorted[at - 1] != number) starts[number] = at;
  if (at == 0) starts[distinct] = occurrences;
}

// `order` has the occurrences by number, those of one as they came. A warp does one distinct id.
extern "C" __global__ void sum_repeated(const Part* parts, int tables, const int* starts, const i64* order,
                                        int distinct, const float* gradients, float* out) {
  const int number = (int)(((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = (int)(threadIdx.x % 32);
  if (number >= distinct) return;
  int low = 0;
  int high = tables;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (parts[middle].number <= number)
      low = middle;
    else
      high = middle;
  }
  const Part part = parts[low];
  const int begin = starts[number];
  const int end = starts[number + 1];
  const float* const from = gradients + part.floats;
  float* const to = out + part.base + (i64)number * part.dim;
  for (int first = 0; first < part.dim; first += 32) {
    const int column = first + lane;
    const bool mine = column < part.dim;
    float sum = 0;
    for (int block = begin; block < end; block += 32) {
      const int many = end - block < 32 ? end - block : 32;
      const int place = lane < many ? (int)order[block + lane] - part.first : 0;
#pragma unroll 8
      for (int k = 0; k < many; ++k) {
        const i64 row = __shfl_sync(0xffffffffu, place, k);
        if (mine) sum += from[row * part.dim + column];
      }
    }
    if (mine) to[column] = sum;
  }
}
