// What kernels are run by: the seam between `cuda.h`, which their source is compiled with, and `runtime.cc`.
#pragma once

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

// Found by what is made of the kernels, which shows nothing but what it is launched by.
#pragma GCC visibility push(default)

namespace emulated {

enum Meeting {
  SYNCTHREADS, SYNCTHREADS_COUNT, SYNCTHREADS_OR, SYNCTHREADS_AND,  // of a block; those below of a warp
  SYNCWARP, SHFL, SHFL_XOR, SHFL_UP, SHFL_DOWN, BALLOT, ALL, ANY, MATCH_ANY,
  REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR, REDUCE_XOR
};

extern "C" {
// Waits until all have come that must, and returns what the meeting gave to this thread.
unsigned long long emulated_meet(int meeting, unsigned mask, unsigned long long value, int aim, int width,
                                 int line);
// Lets other threads go first, now and then.
void emulated_let_others();
[[noreturn]] void emulated_trap(int line);
extern bool emulated_is_shuffled;
const char* emulated_launch(void (*call)(void**), void** arguments, unsigned blocks, unsigned threads,
                            unsigned long long seed, const char* kernel);
extern uint3 emulated_thread_idx, emulated_block_idx;
extern dim3 emulated_block_dim, emulated_grid_dim;
}

}  // namespace emulated

#pragma GCC visibility pop
