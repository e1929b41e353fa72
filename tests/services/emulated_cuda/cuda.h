// What a kernel finds in CUDA C++, for g++: names, types and intrinsics. `runtime.cc` has what they stand on.
//
// No header of the system is included: every source is compiled with this before it, and that must be quick.
#pragma once

#include "runtime.h"

#define __CUDACC_RTC__ 1  // shared headers take what follows for NVRTC
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static  // blocks run one after another
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

#define EMULATED static inline __attribute__((unused))
#define HERE int line = __builtin_LINE()

using size_t = decltype(sizeof(0));

// ---- the runtime ---------------------------------------------------------------------------------

namespace emulated {

EMULATED void between() {
  if (emulated_is_shuffled) emulated_let_others();
}

template <class T>
EMULATED unsigned long long bits(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle carries up to 8 bytes");
  unsigned long long all = 0;
  __builtin_memcpy(&all, &value, sizeof(T));
  return all;
}

template <class T>
EMULATED T from_bits(unsigned long long all) {
  T value;
  __builtin_memcpy(&value, &all, sizeof(T));
  return value;
}

template <int... I>
struct Numbers {};

// Calls a kernel with arguments as a launch has them, by their addresses.
template <class... A, int... I>
EMULATED void call(void (*kernel)(A...), void** arguments, Numbers<I...>) {
  kernel(*(A*)arguments[I]...);
}

template <class... A>
struct Sizes {
  static constexpr int count = sizeof...(A);
  static constexpr int of[sizeof...(A) + 1] = {(int)sizeof(A)..., 0};
};

template <class... A>
EMULATED Sizes<A...> sizes_of(void (*)(A...)) {
  return {};
}

template <class... A>
EMULATED void call(void (*kernel)(A...), void** arguments) {
  call(kernel, arguments, Numbers<__integer_pack((int)sizeof...(A))...>());
}

}  // namespace emulated

#define EMULATED_OFFERED extern "C" __attribute__((visibility("default")))
#define EMULATED_KERNEL(name)                                                                              \
  EMULATED_OFFERED const char* emulated_launch_##name(void** arguments, unsigned blocks, unsigned threads, \
                                                      unsigned long long seed) {                           \
    return emulated::emulated_launch([](void** of) { emulated::call(name, of); }, arguments, blocks,       \
                                     threads, seed, #name);                                                \
  }                                                                                                        \
  EMULATED_OFFERED int emulated_size_##name(int argument) {                                                \
    using All = decltype(emulated::sizes_of(name));                                                        \
    return argument < 0 ? All::count : All::of[argument];                                                  \
  }

// ---- types ---------------------------------------------------------------------------------------

#define EMULATED_VECTOR(type, name)                                                              \
  struct __align__(2 * sizeof(type)) name##2 { type x, y; };                                     \
  struct __align__(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; };  \
  EMULATED name##2 make_##name##2(type x, type y) { return {x, y}; }                             \
  EMULATED name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTOR(float, float)
EMULATED_VECTOR(double, double)
EMULATED_VECTOR(int, int)
EMULATED_VECTOR(unsigned, uint)
EMULATED_VECTOR(long long, longlong)
EMULATED_VECTOR(unsigned long long, ulonglong)
EMULATED_VECTOR(signed char, char)
EMULATED_VECTOR(unsigned char, uchar)
EMULATED_VECTOR(short, short)
EMULATED_VECTOR(unsigned short, ushort)

#define threadIdx emulated::emulated_thread_idx
#define blockIdx emulated::emulated_block_idx
#define blockDim emulated::emulated_block_dim
#define gridDim emulated::emulated_grid_dim
#define warpSize 32

// ---- meetings of a block and of a warp ------------------------------------------------------------

EMULATED void __syncthreads(HERE) { emulated::emulated_meet(emulated::SYNCTHREADS, 0, 0, 0, 0, line); }
EMULATED int __syncthreads_count(int one, HERE) {
  return (int)emulated::emulated_meet(emulated::SYNCTHREADS_COUNT, 0, one != 0, 0, 0, line);
}
EMULATED int __syncthreads_or(int one, HERE) {
  return (int)emulated::emulated_meet(emulated::SYNCTHREADS_OR, 0, one != 0, 0, 0, line);
}
EMULATED int __syncthreads_and(int one, HERE) {
  return (int)emulated::emulated_meet(emulated::SYNCTHREADS_AND, 0, one != 0, 0, 0, line);
}
EMULATED void __syncwarp(unsigned mask = 0xffffffffu, HERE) {
  emulated::emulated_meet(emulated::SYNCWARP, mask, 0, 0, 0, line);
}
#define EMULATED_SHUFFLE(name, meeting)                                                                   \
  template <class T>                                                                                      \
  EMULATED T name(unsigned mask, T value, int aim, int width = 32, HERE) {                                \
    return emulated::from_bits<T>(                                                                        \
        emulated::emulated_meet(emulated::meeting, mask, emulated::bits(value), aim, width, line));       \
  }
EMULATED_SHUFFLE(__shfl_sync, SHFL)
EMULATED_SHUFFLE(__shfl_xor_sync, SHFL_XOR)
EMULATED_SHUFFLE(__shfl_up_sync, SHFL_UP)
EMULATED_SHUFFLE(__shfl_down_sync, SHFL_DOWN)
EMULATED unsigned __ballot_sync(unsigned mask, int one, HERE) {
  return (unsigned)emulated::emulated_meet(emulated::BALLOT, mask, one != 0, 0, 0, line);
}
EMULATED int __all_sync(unsigned mask, int one, HERE) {
  return (int)emulated::emulated_meet(emulated::ALL, mask, one != 0, 0, 0, line);
}
EMULATED int __any_sync(unsigned mask, int one, HERE) {
  return (int)emulated::emulated_meet(emulated::ANY, mask, one != 0, 0, 0, line);
}
template <class T>
EMULATED unsigned __match_any_sync(unsigned mask, T value, HERE) {
  return (unsigned)emulated::emulated_meet(emulated::MATCH_ANY, mask, emulated::bits(value), 0, 0, line);
}
#define EMULATED_REDUCE(name, meeting)                                                                     \
  EMULATED unsigned name(unsigned mask, unsigned value, HERE) {                                            \
    return (unsigned)emulated::emulated_meet(emulated::meeting, mask, value, 0, 0, line);                  \
  }
EMULATED_REDUCE(__reduce_add_sync, REDUCE_ADD)
EMULATED_REDUCE(__reduce_min_sync, REDUCE_MIN)
EMULATED_REDUCE(__reduce_max_sync, REDUCE_MAX)
EMULATED_REDUCE(__reduce_and_sync, REDUCE_AND)
EMULATED_REDUCE(__reduce_or_sync, REDUCE_OR)
EMULATED_REDUCE(__reduce_xor_sync, REDUCE_XOR)
#define __trap() emulated::emulated_trap(__LINE__)

// ---- memory --------------------------------------------------------------------------------------

EMULATED void __threadfence() {}
EMULATED void __threadfence_block() {}
EMULATED void __threadfence_system() {}
#define EMULATED_LOAD(name)                \
  template <class T>                       \
  EMULATED T name(const T* from) {         \
    emulated::between();                   \
    return *from;                          \
  }
EMULATED_LOAD(__ldcg)
EMULATED_LOAD(__ldca)
EMULATED_LOAD(__ldcs)
EMULATED_LOAD(__ldcv)
EMULATED_LOAD(__ldlu)
EMULATED_LOAD(__ldg)
#define EMULATED_STORE(name)               \
  template <class T>                       \
  EMULATED void name(T* to, T value) {     \
    *to = value;                           \
  }
EMULATED_STORE(__stcg)
EMULATED_STORE(__stcs)
EMULATED_STORE(__stwb)
EMULATED_STORE(__stwt)

#define EMULATED_ATOMIC(type, name, after)          \
  EMULATED type name(type* at, type value) {        \
    emulated::between();                            \
    const type before = *at;                        \
    *at = (after);                                  \
    return before;                                  \
  }
#define EMULATED_ATOMICS(type)                                                 \
  EMULATED_ATOMIC(type, atomicAdd, before + value)                             \
  EMULATED_ATOMIC(type, atomicMax, before < value ? value : before)            \
  EMULATED_ATOMIC(type, atomicMin, value < before ? value : before)            \
  EMULATED_ATOMIC(type, atomicExch, value)                                     \
  EMULATED_ATOMIC(type, atomicAnd, before & value)                             \
  EMULATED_ATOMIC(type, atomicOr, before | value)                              \
  EMULATED_ATOMIC(type, atomicXor, before ^ value)                             \
  EMULATED type atomicCAS(type* at, type expected, type value) {               \
    emulated::between();                                                       \
    const type before = *at;                                                   \
    if (before == expected) *at = value;                                       \
    return before;                                                             \
  }
EMULATED_ATOMICS(int)
EMULATED_ATOMICS(unsigned)
EMULATED_ATOMICS(unsigned long long)
EMULATED_ATOMIC(int, atomicSub, before - value)
EMULATED_ATOMIC(unsigned, atomicSub, before - value)
EMULATED_ATOMIC(long long, atomicMax, before < value ? value : before)
EMULATED_ATOMIC(long long, atomicMin, value < before ? value : before)
EMULATED_ATOMIC(float, atomicAdd, before + value)
EMULATED_ATOMIC(float, atomicExch, value)
EMULATED_ATOMIC(double, atomicAdd, before + value)

// ---- bits ----------------------------------------------------------------------------------------

EMULATED int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATED int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMULATED int __ffs(int x) { return __builtin_ffs(x); }
EMULATED int __ffsll(long long x) { return __builtin_ffsll(x); }
EMULATED int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
EMULATED int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
EMULATED unsigned __brev(unsigned x) {
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= (x >> i & 1) << (31 - i);
  return all;
}
EMULATED unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
EMULATED unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}
EMULATED unsigned __float_as_uint(float x) { return (unsigned)emulated::bits(x); }
EMULATED int __float_as_int(float x) { return (int)emulated::bits(x); }
EMULATED float __uint_as_float(unsigned x) { return emulated::from_bits<float>(x); }
EMULATED float __int_as_float(int x) { return emulated::from_bits<float>((unsigned)x); }
EMULATED long long __double_as_longlong(double x) { return (long long)emulated::bits(x); }
EMULATED double __longlong_as_double(long long x) { return emulated::from_bits<double>((unsigned long long)x); }

// ---- numbers -------------------------------------------------------------------------------------

#define EMULATED_ORDER(type, one, other)                                       \
  EMULATED type max(one x, other y) { return (type)x < (type)y ? (type)y : (type)x; } \
  EMULATED type min(one x, other y) { return (type)y < (type)x ? (type)y : (type)x; }
EMULATED_ORDER(int, int, int)
EMULATED_ORDER(unsigned, unsigned, unsigned)
EMULATED_ORDER(unsigned, unsigned, int)
EMULATED_ORDER(unsigned, int, unsigned)
EMULATED_ORDER(long, long, long)
EMULATED_ORDER(unsigned long, unsigned long, unsigned long)
EMULATED_ORDER(long long, long long, long long)
EMULATED_ORDER(unsigned long long, unsigned long long, unsigned long long)
EMULATED_ORDER(unsigned long long, long long, unsigned long long)
EMULATED_ORDER(unsigned long long, unsigned long long, long long)
EMULATED float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
EMULATED float fminf(float x, float y) { return __builtin_fminf(x, y); }
EMULATED double fmax(double x, double y) { return __builtin_fmax(x, y); }
EMULATED double fmin(double x, double y) { return __builtin_fmin(x, y); }
EMULATED float max(float x, float y) { return __builtin_fmaxf(x, y); }
EMULATED float min(float x, float y) { return __builtin_fminf(x, y); }
EMULATED double max(double x, double y) { return __builtin_fmax(x, y); }
EMULATED double min(double x, double y) { return __builtin_fmin(x, y); }
EMULATED bool isfinite(float x) { return __builtin_isfinite(x); }
EMULATED bool isfinite(double x) { return __builtin_isfinite(x); }
EMULATED bool isnan(float x) { return __builtin_isnan(x); }
EMULATED bool isnan(double x) { return __builtin_isnan(x); }
EMULATED bool isinf(float x) { return __builtin_isinf(x); }
EMULATED bool isinf(double x) { return __builtin_isinf(x); }
EMULATED bool signbit(float x) { return __builtin_signbit(x); }
#define EMULATED_MATH(name)                                       \
  EMULATED float name##f(float x) { return __builtin_##name##f(x); } \
  EMULATED float name(float x) { return __builtin_##name##f(x); }    \
  EMULATED double name(double x) { return __builtin_##name(x); }
EMULATED_MATH(sqrt)
EMULATED_MATH(fabs)
EMULATED_MATH(trunc)
EMULATED_MATH(floor)
EMULATED_MATH(ceil)
EMULATED_MATH(rint)
EMULATED_MATH(round)
EMULATED_MATH(tanh)
EMULATED_MATH(exp)
EMULATED_MATH(exp2)
EMULATED_MATH(log)
EMULATED_MATH(log2)
EMULATED_MATH(log1p)
EMULATED_MATH(expm1)
EMULATED_MATH(sin)
EMULATED_MATH(cos)
EMULATED float powf(float x, float y) { return __builtin_powf(x, y); }
EMULATED double pow(double x, double y) { return __builtin_pow(x, y); }
EMULATED float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
EMULATED double copysign(double x, double y) { return __builtin_copysign(x, y); }
EMULATED float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
EMULATED float fmodf(float x, float y) { return __builtin_fmodf(x, y); }
EMULATED float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
EMULATED float __expf(float x) { return __builtin_expf(x); }
EMULATED float __logf(float x) { return __builtin_logf(x); }
EMULATED float __fadd_rn(float x, float y) { return x + y; }
EMULATED float __fsub_rn(float x, float y) { return x - y; }
EMULATED float __fmul_rn(float x, float y) { return x * y; }
EMULATED float __fdiv_rn(float x, float y) { return x / y; }
EMULATED float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
EMULATED float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
EMULATED float __fdividef(float x, float y) { return x / y; }
EMULATED int abs(int x) { return x < 0 ? -x : x; }
