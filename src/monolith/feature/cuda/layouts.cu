// From looked-up rows to the tensors a model reads, and gradients back, on the device.
//
// A batch has a row for each occurrence of an id: table after table, within a table feature after feature,
// and within a feature cell after cell; `native/src/layouts.h` says what cells are. Sums are taken in the
// order of the core, so that outputs have its bits; a gradient belongs to one occurrence, and who trains adds
// up those of equal ids.
//
// The occurrences of a table may be followed by some that belong to no feature, which pad the batch: outputs
// do not depend on them, and their gradient is 0.
//
// OUTPUTS, the most outputs a plan may have, is defined before this.

typedef long long i64;

enum Pooling { SUM, MEAN, MAX, FIRST_N };

// One feature in one batch.
struct Feature {
  i64 base;   // floats to where the row of occurrence 0 would lie, were all rows as wide
  i64 begin;  // floats to its first row
  int first;  // its first occurrence
  int cell;   // its first cell among the splits; below 0 where the batch does not have it
  int shift;  // from the batch's splits to occurrences
  int step;   // cells from one example to the next: 0 where one cell is shared by all
  int dim;
  int pooling;
  int length;  // FIRST_N: positions of an example; 0 otherwise
  int weighted;
  int columns;  // the first of its columns in `Plan::firsts`
  int count;    // its occurrences; what follows them up to the next table pads the batch
};

struct Batch {
  const Feature* features;  // in the order of their tables
  const int* splits;        // null where every cell has one id
  const float* weights;     // by occurrence; null where none is weighted
  int examples;
  int count;  // of features

  __device__ __forceinline__ int cell_begin(const Feature& f, int cell) const {
    return splits != nullptr ? splits[f.cell + cell] + f.shift : f.first + cell;
  }
};

// One float of an example's outputs, and the uses that add up to it.
struct Column {
  int output;
  int floats;  // of an example in the output
  int column;  // of these, which one
  int first;   // use
  int uses;
  int position;  // FIRST_N
};

struct Use {
  int feature;
  int column;  // of the row
};

// One float of an output that a float of a row goes to.
struct Back {
  int output;
  int floats;
  int column;
  int stride;  // FIRST_N: from one position to the next
  int flat;    // among the columns of all outputs
};

struct Plan {
  const Column* columns;  // of all outputs, one after another
  const Use* uses;
  const int* firsts;  // by column of a feature's row: its first back, then the end
  const Back* backs;
  int width;  // columns
};

struct Pointers {
  float* at[OUTPUTS];
};

// Of an argument that is read by an index: it stays where arguments are, in place of a copy for each thread.
#ifdef __CUDA_ARCH__
#define CONSTANT const __grid_constant__
#else
#define CONSTANT const
#endif

// ---- forward -------------------------------------------------------------------------------------

// What a mean of weighted rows multiplies by, given the weight; as the core, 0 where the weights add up to 0.
__device__ __forceinline__ float weights_in(const Batch& batch, int first, int last) {
  float sum = 0;
  for (int at = first; at < last; ++at) sum += batch.weights[at];
  return sum;
}

__device__ float pooled(const Batch& batch, const Feature& f, int column, int example, int position,
                        const float* rows) {
  if (f.cell < 0) return 0;
  const int cell = example * f.step;
  const int first = batch.cell_begin(f, cell);
  const int last = batch.cell_begin(f, cell + 1);
  const i64 dim = f.dim;
  const float* const from = rows + f.base + column;
  if (f.pooling == FIRST_N) {
    if (position >= last - first) return 0;
    const float kept = from[(first + position) * dim];
    return f.weighted ? kept * batch.weights[first + position] : kept;
  }
  float sum = 0;
  if (f.weighted) {
    const bool mean = f.pooling == MEAN;
    const float all = mean ? weights_in(batch, first, last) : 1.0f;
    for (int at = first; at < last; ++at) {
      const float weight = batch.weights[at];
      sum += from[at * dim] * (mean ? (all == 0 ? 0.0f : weight / all) : weight);
    }
    return sum;
  }
  if (last - first == 1) return from[first * dim];
  if (f.pooling == MAX && last > first) {
    float peak = from[first * dim];
    for (int at = first + 1; at < last; ++at) {
      const float other = from[at * dim];
      peak = peak < other ? other : peak;
    }
    return peak;
  }
  for (int at = first; at < last; ++at) sum += from[at * dim];
  return f.pooling == MEAN && last > first ? sum / (float)(last - first) : sum;
}

// Each thread does one column of so many examples, far apart: it reads and writes next to its neighbours, so
// that memory accesses coalesce.
#define EXAMPLES 4

extern "C" __global__ void gather(Batch batch, Plan plan, CONSTANT Pointers outputs, const float* rows) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int groups = (batch.examples + EXAMPLES - 1) / EXAMPLES;
  const Column c = plan.columns[thread % (unsigned)plan.width];
  float* const to = outputs.at[c.output] + c.column;
  const int group = (int)(thread / (unsigned)plan.width);
  if (group >= groups) return;
#pragma unroll 1
  for (int example = group; example < batch.examples; example += groups) {
    float found = 0;
#pragma unroll 1
    for (int u = 0; u < c.uses; ++u) {
      const Use use = plan.uses[c.first + u];
      const float more = pooled(batch, batch.features[use.feature], use.column, example, c.position, rows);
      found = u == 0 ? more : found + more;
    }
    to[(i64)example * c.floats] = found;
  }
}

// The same where every feature is there with one id in every cell, without weights, and none keeps its first.
// A thread waits for several rows at once.
extern "C" __global__ void gather_plain(Batch batch, Plan plan, CONSTANT Pointers outputs,
                                        const float* rows) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int groups = (batch.examples + EXAMPLES - 1) / EXAMPLES;
  const int group = (int)(thread / (unsigned)plan.width);
  if (group >= groups) return;
  const Column c = plan.columns[thread % (unsigned)plan.width];
  float found[EXAMPLES];
#pragma unroll 1
  for (int u = 0; u < c.uses; ++u) {
    const Use use = plan.uses[c.first + u];
    const Feature& f = batch.features[use.feature];
    const float* const from = rows + f.base + use.column;
    const int first = f.first;
    const int step = f.step;
    const i64 dim = f.dim;
    float more[EXAMPLES];
#pragma unroll
    for (int k = 0; k < EXAMPLES; ++k) {
      const int example = group + k * groups;
      more[k] = example < batch.examples ? from[(first + example * step) * dim] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < EXAMPLES; ++k) found[k] = u == 0 ? more[k] : found[k] + more[k];
  }
  float* const to = outputs.at[c.output] + c.column;
#pragma unroll
  for (int k = 0; k < EXAMPLES; ++k) {
    const int example = group + k * groups;
    if (example < batch.examples) to[(i64)example * c.floats] = found[k];
  }
}

// ---- event times ---------------------------------------------------------------------------------

// Gives each occurrence the time of its example; one in a shared cell the newest of all.
extern "C" __global__ void spread_times(Batch batch, const i64* times, const i64* newest, i64* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned place = thread / (unsigned)batch.examples;
  const int example = (int)(thread % (unsigned)batch.examples);
  if (place >= (unsigned)batch.count) return;
  const Feature& f = batch.features[place];
  if (f.cell < 0 || (f.step == 0 && example > 0)) return;
  const i64 time = f.step == 0 ? *newest : times[example];
  const int last = batch.cell_begin(f, example + 1);
  for (int at = batch.cell_begin(f, example); at < last; ++at) out[at] = time;
}

// ---- backward ------------------------------------------------------------------------------------

// What a shared cell gets: the gradients of all examples, added up one after another as in the core.
extern "C" __global__ void sum_examples(Plan plan, CONSTANT Pointers gradients, int examples, float* sums) {
  const int flat = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (flat >= plan.width) return;
  const Column c = plan.columns[flat];
  const float* const from = gradients.at[c.output];
  float sum = 0;
  if (from != nullptr) {
#pragma unroll 8
    for (int example = 0; example < examples; ++example) sum += from[(i64)example * c.floats + c.column];
  }
  sums[flat] = sum;
}

// Of cells that begin in order, the one that an occurrence is in.
__device__ __forceinline__ int cell_of(const Batch& batch, const Feature& f, int at) {
  if (f.step == 0) return 0;
  if (batch.splits == nullptr) return at - f.first;
  int low = 0;
  int high = batch.examples;  // the answer is in [low, high)
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (batch.cell_begin(f, middle) <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ float gradient_of(const Batch& batch, const Plan& plan, const Pointers& gradients,
                             const Feature& f, int at, int column, const float* sums, const float* rows,
                             float scale) {
  const int cell = cell_of(batch, f, at);
  int first = 0;
  int last = 0;
  int position = 0;
  float factor = scale;
  float peak = 0;
  float sharers = 1;
  if (f.pooling != SUM) {
    first = batch.cell_begin(f, cell);
    last = batch.cell_begin(f, cell + 1);
  }
  if (f.pooling == FIRST_N) {
    position = at - first;
    if (position >= f.length) return 0;
  } else if (f.pooling == MEAN && !f.weighted) {
    factor /= (float)(last - first);
  } else if (f.pooling == MAX) {
    const float* const from = rows + f.base + column;
    peak = -__uint_as_float(0x7f800000u);
    sharers = 0;
    for (int other = first; other < last; ++other) {
      const float value = from[(i64)other * f.dim];
      if (value > peak) peak = value, sharers = 0;
      sharers += value == peak ? 1.0f : 0.0f;
    }
    if (!(from[(i64)at * f.dim] == peak)) return 0;
  }
  if (f.weighted) {
    const float weight = batch.weights[at];
    if (f.pooling == MEAN) {
      const float all = weights_in(batch, first, last);
      factor *= all == 0 ? 0.0f : weight / all;
    } else {
      factor *= weight;
    }
  }
  float sum = 0;
  const int end = plan.firsts[f.columns + column + 1];
  for (int b = plan.firsts[f.columns + column]; b < end; ++b) {
    const Back back = plan.backs[b];
    const float* const from = gradients.at[back.output];
    if (from == nullptr) continue;
    const int offset = position * back.stride;
    const float gradient =
        f.step == 0 ? sums[back.flat + offset] : from[(i64)cell * back.floats + back.column + offset];
    sum += f.pooling == MAX ? gradient * factor / sharers : gradient * factor;
  }
  return sum;
}

#define FLOATS 4  // that each thread does, a block apart

// Fills the gradient of each float of the rows.
extern "C" __global__ void scatter(Batch batch, Plan plan, CONSTANT Pointers gradients, const float* sums,
                                   const float* rows, float scale, i64 floats, float* out) {
  i64 at = (i64)blockIdx.x * blockDim.x * FLOATS + threadIdx.x;
  if (at >= floats) return;
  int low = 0;
  int high = batch.count;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (batch.features[middle].begin <= at)
      low = middle;
    else
      high = middle;
  }
#pragma unroll 1
  for (int k = 0; k < FLOATS && at < floats; ++k, at += blockDim.x) {
    while (low + 1 < batch.count && batch.features[low + 1].begin <= at) ++low;
    const Feature& f = batch.features[low];
    const unsigned within = (unsigned)(at - f.begin);
    const unsigned row = within / (unsigned)f.dim;
    const int column = (int)(within - row * (unsigned)f.dim);
    out[at] = row < (unsigned)f.count
                  ? gradient_of(batch, plan, gradients, f, f.first + (int)row, column, sums, rows, scale)
                  : 0.0f;
  }
}

// ---- equal ids -----------------------------------------------------------------------------------

// Where a table's occurrences and rows begin.
struct Part {
  i64 floats;
  int first;
  int dim;
};

// Gives the first of equal ids of a table the sum of their gradients, in the order of the batch, and the
// others zeros. `order` has occurrences sorted by table and id, equal ones as they came. A warp does one.
extern "C" __global__ void sum_equal(const i64* ids, const int* tables, const i64* order, const Part* parts,
                                     int count, const float* gradients, float* out) {
  const int at = (int)((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = (int)(threadIdx.x % 32);
  if (at >= count) return;
  const int mine = (int)order[at];
  const i64 id = ids[mine];
  const int table = tables[mine];
  const Part part = parts[table];
  float* const to = out + part.floats + (i64)(mine - part.first) * part.dim;
  if (at > 0) {
    const int before = (int)order[at - 1];
    if (ids[before] == id && tables[before] == table) {
      for (int k = lane; k < part.dim; k += 32) to[k] = 0;
      return;
    }
  }
  int end = at + 1;
  for (unsigned others = 0; others == 0; end += others == 0 ? 32 : __ffs((int)others) - 1) {
    const int next = end + lane;
    const bool equal = next < count && ids[order[next]] == id && tables[order[next]] == table;
    others = __ballot_sync(0xffffffffu, !equal);
  }
  const float* const from = gradients + part.floats;
  for (int k = lane; k < part.dim; k += 32) {
    float sum = from[(i64)(mine - part.first) * part.dim + k];
#pragma unroll 4
    for (int next = at + 1; next < end; ++next) sum += from[(order[next] - part.first) * part.dim + k];
    to[k] = sum;
  }
}
