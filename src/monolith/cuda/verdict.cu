// Whether a batch may be applied, found and obeyed on the device: the host learns of it some steps later.
//
//   backward ──► count_non_finite ──► `found` ──► update of weights ──► copy_pieces puts them back if refused
//                                          └────► update of rows: no id gets a place if refused
//
// A piece is one tensor. The pieces of a launch are its parameters, so that a captured launch has their
// addresses; a block works on CHUNK bytes of one of them.

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define PIECES 96        // of a launch: its parameters are 4 KB at most
#define CHUNK (1 << 15)  // bytes, of a block

struct Piece {
  u8* at;
  u8* kept;  // its copy; null where it is only looked at
  i64 bytes;
  int begin;  // its first block
  int kind;
};
static_assert(sizeof(Piece) == 32, "as in verdict.py");

struct Pieces {
  int count;
  int blocks;
  Piece at[PIECES];

  // The last piece that begins at a block or before.
  __device__ const Piece& of(int block) const {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (at[middle].begin <= block)
        low = middle;
      else
        high = middle;
    }
    return at[low];
  }
};
static_assert(sizeof(Pieces) == 8 + PIECES * 32, "as in verdict.py");

// Counts the floats of pieces that are NaN or infinite: found[0] has all of them, found[1 + kind] its own.
extern "C" __global__ void count_non_finite(const __grid_constant__ Pieces pieces, u64* found) {
  const Piece& piece = pieces.of((int)blockIdx.x);
  const i64 floats = piece.bytes / 4;
  const i64 begin = (i64)((int)blockIdx.x - piece.begin) * (CHUNK / 4);
  const i64 end = begin + CHUNK / 4 < floats ? begin + CHUNK / 4 : floats;
  const u32* const words = (const u32*)piece.at;
  int bad = 0;
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x)
    bad += (words[i] & 0x7f800000u) == 0x7f800000u;  // all bits of the exponent: NaN or infinity
  // Almost always none is: one vote per warp, and no atomics.
  const u32 some = __ballot_sync(0xffffffffu, bad != 0);
  if (some != 0 && bad != 0) {
    atomicAdd(&found[0], (u64)bad);
    atomicAdd(&found[1 + piece.kind], (u64)bad);
  }
}

// Copies pieces aside; or, `back`, the copies to where they came from if the batch is refused.
extern "C" __global__ void copy_pieces(const __grid_constant__ Pieces pieces, const u64* refused, int back) {
  if (back != 0 && *refused == 0) return;
  const Piece& piece = pieces.of((int)blockIdx.x);
  const u8* const from = back != 0 ? piece.kept : piece.at;
  u8* const to = back != 0 ? piece.at : piece.kept;
  const i64 begin = (i64)((int)blockIdx.x - piece.begin) * CHUNK;
  const i64 end = begin + CHUNK < piece.bytes ? begin + CHUNK : piece.bytes;
  const i64 words = (((u64)from | (u64)to) & 3) == 0 ? (end - begin) / 4 : 0;
  for (i64 i = threadIdx.x; i < words; i += blockDim.x)
    ((u32*)(to + begin))[i] = ((const u32*)(from + begin))[i];
  for (i64 i = begin + 4 * words + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
}
