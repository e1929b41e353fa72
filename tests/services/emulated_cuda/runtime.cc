// Runs kernels on the CPU: blocks one after another, threads of a block by turns.
//
// A thread runs until it has to wait for others, at a barrier or an intrinsic of its warp, and goes on once all
// have come that must: the threads of the mask, or of the block, that have not ended. Where nobody can go on the
// launch fails and says who waits where. With a seed blocks and threads go on in an order drawn from it, and let
// others go first at atomics and at loads past the cache: what depends on the order comes out differently.
//
// A thread that waits keeps its stack, and who has its turn next goes on at once; a stack whose thread has ended
// is there for the next to begin. So threads that never wait are run like calls in a loop.

#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#include "runtime.h"

uint3 emulated::emulated_thread_idx, emulated::emulated_block_idx;
dim3 emulated::emulated_block_dim, emulated::emulated_grid_dim;
bool emulated::emulated_is_shuffled;

namespace {

using namespace emulated;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr size_t kStack = 256 << 10;
constexpr size_t kGuard = 64 << 10;  // at least a page, wherever pages are large
constexpr int kWarp = 32;

const char* const kNames[] = {"__syncthreads",     "__syncthreads_count", "__syncthreads_or",
                              "__syncthreads_and", "__syncwarp",          "__shfl_sync",
                              "__shfl_xor_sync",   "__shfl_up_sync",      "__shfl_down_sync",
                              "__ballot_sync",     "__all_sync",          "__any_sync",
                              "__match_any_sync",  "__reduce_add_sync",   "__reduce_min_sync",
                              "__reduce_max_sync", "__reduce_and_sync",   "__reduce_or_sync",
                              "__reduce_xor_sync"};

// What a thread has come to.
struct Arrival {
  int meeting;
  u32 mask;
  int line;
  int aim;
  int width;
  u64 value;

  bool is_same(const Arrival& other) const {
    return meeting == other.meeting && mask == other.mask && line == other.line;
  }
};

struct Stack {
  jmp_buf at;
  ucontext_t context;
  char* memory = nullptr;
  bool is_begun = false;
};

struct Thread {
  Stack* stack = nullptr;  // none before it begins
  bool is_over = false;
  bool waits = false;
  Arrival arrival;
  u64 result = 0;
};

std::mutex running;  // one launch at a time; guards all below
std::vector<Stack*> stacks;
std::vector<Stack*> idle;
Stack* entered;  // for the first time
std::vector<Thread> threads;
std::vector<int> ready;
size_t next_ready;
jmp_buf scheduler;
int current;
int threads_there;
int at_barrier;
int ended;
std::vector<u32> alive;    // by warp: lanes that have not ended
std::vector<u32> waiting;  // by warp: lanes at an intrinsic of the warp
void (*body)(void**);
void** body_arguments;
std::string kernel_name;
std::string failure;
u64 random_state;

u64 draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

void fail(const std::string& what) {
  if (failure.empty()) failure = kernel_name + ": " + what;
}

void meet_others(int warp, int lane);
void meet_block(int thread);

// Returns who has its turn next, the first that came or any; -1 when nobody can go on.
int next_turn() {
  if (next_ready == ready.size() || !failure.empty()) return -1;
  if (emulated_is_shuffled)
    std::swap(ready[next_ready], ready[next_ready + draw() % (ready.size() - next_ready)]);
  return ready[next_ready++];
}

void become(int thread) {
  current = thread;
  emulated_thread_idx = {(u32)thread, 0, 0};
}

void end_thread() {
  const int warp = current / kWarp;
  threads[current].is_over = true;
  ++ended;
  alive[warp] &= ~(1u << current % kWarp);
  // Those who wait may have waited for this one only.
  for (u32 left = waiting[warp]; left != 0; left &= waiting[warp] & (left - 1))
    meet_others(warp, __builtin_ctz(left));
  for (int t = 0; at_barrier > 0 && at_barrier == threads_there - ended && t < threads_there; ++t)
    if (threads[t].waits && threads[t].arrival.meeting < SYNCWARP) {
      meet_block(t);
      break;
    }
}

// What a stack does: runs a thread, and then the next that has not begun, or lets another stack go on.
void run_threads() {
  Stack* const own = entered;
  for (;;) {
    threads[current].stack = own;
    body(body_arguments);
    end_thread();
    const int next = next_turn();
    if (next >= 0) become(next);
    if (next >= 0 && threads[next].stack == nullptr) continue;
    idle.push_back(own);
    if (_setjmp(own->at) == 0) _longjmp(next < 0 ? scheduler : threads[next].stack->at, 1);
  }
}

// Goes on with another thread, where it was or at its beginning.
[[noreturn]] void enter(int thread) {
  become(thread);
  Stack* stack = threads[thread].stack;
  if (stack == nullptr) {
    if (idle.empty()) {
      stack = new Stack;
      stack->memory = (char*)mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      mprotect(stack->memory, kGuard, PROT_NONE);
      stacks.push_back(stack);
    } else {
      stack = idle.back();
      idle.pop_back();
    }
  }
  if (stack->is_begun) _longjmp(stack->at, 1);
  stack->is_begun = true;
  getcontext(&stack->context);
  stack->context.uc_stack.ss_sp = stack->memory + kGuard;
  stack->context.uc_stack.ss_size = kStack;
  stack->context.uc_link = nullptr;
  makecontext(&stack->context, run_threads, 0);
  entered = stack;
  setcontext(&stack->context);
  __builtin_unreachable();
}

// Lets another thread go on; returns when it is this one's turn again.
void leave() {
  const int next = next_turn();
  if (next == current) return;
  if (_setjmp(threads[current].stack->at) != 0) return;
  if (next < 0) _longjmp(scheduler, 1);
  enter(next);
}

void go_on(int thread, u64 result) {
  Thread& own = threads[thread];
  own.result = result;
  own.waits = false;
  if (thread != current || own.is_over) ready.push_back(thread);
}

u64 shuffled(int warp, int lane, u32 there) {
  const Arrival& own = threads[warp * kWarp + lane].arrival;
  const int first = lane & ~(own.width - 1);
  int from = lane;
  if (own.meeting == SHFL) from = first | (own.aim & (own.width - 1));
  if (own.meeting == SHFL_XOR) from = lane ^ own.aim;
  if (own.meeting == SHFL_UP && lane - own.aim >= first) from = lane - own.aim;
  if (own.meeting == SHFL_DOWN && lane + own.aim < first + own.width) from = lane + own.aim;
  if (from >= first + own.width) from = lane;
  if (from < 0 || (there >> from & 1) == 0) {
    fail("lane " + std::to_string(lane) + " reads lane " + std::to_string(from) + " by " +
         kNames[own.meeting] + " in line " + std::to_string(own.line) + ", which does not take part");
    return 0;
  }
  return threads[warp * kWarp + from].arrival.value;
}

// Lets the lanes of a mask go on, if all of it are there.
void meet_others(int warp, int lane) {
  const Arrival own = threads[warp * kWarp + lane].arrival;
  const u32 there = own.mask & alive[warp];
  if ((there & ~waiting[warp]) != 0) return;
  u64 all = own.meeting == ALL || own.meeting == REDUCE_AND ? ~0ull : own.meeting == REDUCE_MIN ? ~0u : 0;
  u64 results[kWarp] = {};
  for (u32 left = there; left != 0; left &= left - 1) {
    const int l = __builtin_ctz(left);
    const Arrival& one = threads[warp * kWarp + l].arrival;
    if (!one.is_same(own)) return;
    switch (own.meeting) {
      case BALLOT: all |= one.value << l; break;
      case ALL: all = all != 0 && one.value != 0; break;
      case ANY: all = all != 0 || one.value != 0; break;
      case REDUCE_ADD: all += one.value; break;
      case REDUCE_MIN: all = one.value < all ? one.value : all; break;
      case REDUCE_MAX: all = one.value > all ? one.value : all; break;
      case REDUCE_AND: all &= one.value; break;
      case REDUCE_OR: all |= one.value; break;
      case REDUCE_XOR: all ^= one.value; break;
      default: break;
    }
  }
  for (u32 left = there; left != 0; left &= left - 1) {
    const int l = __builtin_ctz(left);
    results[l] = all;
    if (own.meeting >= SHFL && own.meeting <= SHFL_DOWN) results[l] = shuffled(warp, l, there);
    if (own.meeting == MATCH_ANY)
      for (u32 others = there; others != 0; others &= others - 1) {
        const int o = __builtin_ctz(others);
        const auto value_of = [&](int of) { return threads[warp * kWarp + of].arrival.value; };
        if (value_of(o) == value_of(l)) results[l] |= 1u << o;
      }
  }
  waiting[warp] &= ~there;
  for (u32 left = there; left != 0; left &= left - 1) {
    const int l = __builtin_ctz(left);
    go_on(warp * kWarp + l, results[l]);
  }
}

// Lets the block go on, if all of it are there.
void meet_block(int thread) {
  if (at_barrier < threads_there - ended) return;
  const Arrival own = threads[thread].arrival;
  u64 count = 0;
  for (int t = 0; t < threads_there; ++t) {
    if (threads[t].is_over) continue;
    if (!threads[t].arrival.is_same(own)) return;
    count += threads[t].arrival.value;
  }
  const u64 many = threads_there - ended;
  const u64 result = own.meeting == SYNCTHREADS_OR ? count != 0 : own.meeting == SYNCTHREADS_AND ? count == many : count;
  at_barrier = 0;
  for (int t = 0; t < threads_there; ++t)
    if (!threads[t].is_over) go_on(t, result);
}

std::string who_waits() {
  std::map<std::string, int> many;
  for (int t = 0; t < threads_there; ++t)
    if (threads[t].waits) {
      const Arrival& at = threads[t].arrival;
      char where[96];
      std::snprintf(where, sizeof where, "%s in line %d", kNames[at.meeting], at.line);
      if (at.meeting >= SYNCWARP)
        std::snprintf(where + std::strlen(where), 32, " with mask %#x", at.mask);
      ++many[where];
    }
  std::string all;
  for (const auto& [where, count] : many)
    all += (all.empty() ? "" : ", ") + std::to_string(count) + " at " + where;
  return all;
}

void run_block() {
  ready.clear();
  next_ready = 0;
  ended = at_barrier = 0;
  const int warps = (threads_there + kWarp - 1) / kWarp;
  alive.assign(warps, ~0u);
  if (threads_there % kWarp != 0) alive.back() = (1u << threads_there % kWarp) - 1;
  waiting.assign(warps, 0);
  threads.assign(threads_there, {});
  for (int t = 0; t < threads_there; ++t) ready.push_back(t);
  if (_setjmp(scheduler) == 0) enter(next_turn());
  if (failure.empty() && ended < threads_there) fail("threads wait for one another: " + who_waits());
}

}  // namespace

extern "C" {

u64 emulated::emulated_meet(int meeting, u32 mask, u64 value, int aim, int width, int line) {
  const int thread = current;
  Thread& own = threads[thread];
  own.arrival = {meeting, mask, line, aim, width, value};
  own.waits = true;
  if (meeting < SYNCWARP) {
    ++at_barrier;
    meet_block(thread);
  } else {
    if ((mask >> thread % kWarp & 1) == 0)
      fail(std::string(kNames[meeting]) + " in line " + std::to_string(line) + " by a lane that is not of its mask");
    waiting[thread / kWarp] |= 1u << thread % kWarp;
    meet_others(thread / kWarp, thread % kWarp);
  }
  if (own.waits || !failure.empty()) leave();
  return own.result;
}

void emulated::emulated_let_others() {
  if (draw() % 4 != 0) return;
  ready.push_back(current);
  leave();
}

void emulated::emulated_trap(int line) {
  fail("trapped in line " + std::to_string(line));
  leave();
  __builtin_unreachable();
}

const char* emulated::emulated_launch(void (*call)(void**), void** arguments, u32 blocks, u32 many, u64 seed,
                                      const char* kernel) {
  static thread_local std::string said;
  const std::lock_guard lock(running);
  body = call;
  body_arguments = arguments;
  kernel_name = kernel;
  failure.clear();
  emulated_is_shuffled = seed != 0;
  random_state = seed * 0x9e3779b97f4a7c15ull | 1;
  emulated_block_dim = {many, 1, 1};
  emulated_grid_dim = {blocks, 1, 1};
  threads_there = (int)many;
  std::vector<u32> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (size_t left = blocks; emulated_is_shuffled && left > 1; --left)
    std::swap(order[left - 1], order[draw() % left]);
  for (const u32 block : order) {
    emulated_block_idx = {block, 0, 0};
    run_block();
    if (!failure.empty()) break;
  }
  if (failure.empty()) return nullptr;
  idle = stacks;
  for (Stack* const stack : stacks) stack->is_begun = false;  // in the middle of something: begun anew
  said = failure;
  return said.c_str();
}

}  // extern "C"
