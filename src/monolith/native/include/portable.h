// What the shared headers need of their compiler.
//
// Headers in this folder have arithmetic that must give the same bits in host memory and on a GPU. The core
// compiles them with g++ or clang, kernels with NVRTC, and the emulated device of the tests with g++ in the
// place of NVRTC. A device has no headers of the system, so all they need is here.
#pragma once

#if defined(__CUDACC_RTC__)

#define MONOLITH_SHARED __device__ __forceinline__
#define MONOLITH_INLINE

namespace monolith {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

MONOLITH_SHARED u32 bits_of(float x) {
  return __float_as_uint(x);
}
MONOLITH_SHARED float float_with(u32 bits) {
  return __uint_as_float(bits);
}
MONOLITH_SHARED float root(float x) {
  return sqrtf(x);
}
MONOLITH_SHARED double root(double x) {
  return sqrt(x);
}
MONOLITH_SHARED float magnitude_of(float x) {
  return fabsf(x);
}
MONOLITH_SHARED float with_sign(float magnitude, float sign) {
  return copysignf(magnitude, sign);
}
MONOLITH_SHARED float whole_part(float x) {
  return truncf(x);
}
MONOLITH_SHARED float tanh_of(float x) {
  return tanhf(x);
}
MONOLITH_SHARED double doubles_of(float x) {
  return x;
}
MONOLITH_SHARED float floats_like(float, double x) {
  return static_cast<float>(x);
}

}  // namespace monolith

#else

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

// Always inlined, here as on a device: what a kernel for AVX-512 calls must be compiled for AVX-512, too.
#define MONOLITH_INLINE __attribute__((always_inline))
#define MONOLITH_SHARED inline MONOLITH_INLINE

namespace monolith {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

inline u32 bits_of(float x) {
  return std::bit_cast<u32>(x);
}
inline float float_with(u32 bits) {
  return std::bit_cast<float>(bits);
}

// In the core these also take a vector: as many floats (or doubles) as one register of the processor holds,
// written with the vector extension of g++ and clang. The loop over lanes becomes one instruction.
template <class T>
inline constexpr bool is_vector = !std::is_arithmetic_v<T>;

template <class Floats>
MONOLITH_SHARED Floats root(Floats x) {
  if constexpr (is_vector<Floats>) {
    for (unsigned i = 0; i < sizeof(x) / sizeof(x[0]); ++i) x[i] = std::sqrt(x[i]);
    return x;
  } else {
    return std::sqrt(x);
  }
}
template <class Floats>
MONOLITH_SHARED Floats magnitude_of(Floats x) {
  if constexpr (is_vector<Floats>)
    return x < 0 ? -x : x;
  else
    return std::abs(x);
}
template <class Floats>
MONOLITH_SHARED Floats with_sign(float magnitude, Floats sign) {
  if constexpr (is_vector<Floats>)
    return sign < 0 ? -magnitude : magnitude + Floats{};
  else
    return std::copysign(magnitude, sign);
}
inline float whole_part(float x) {
  return std::trunc(x);
}
inline float tanh_of(float x) {
  return std::tanh(x);
}

// A vector of doubles with as many lanes as Floats, or a double.
template <class Floats>
struct DoublesOf {
  using Type = double;
};
template <class Floats>
  requires is_vector<Floats>
struct DoublesOf<Floats> {
  typedef double Type __attribute__((vector_size(2 * sizeof(Floats))));
};
template <class Floats>
MONOLITH_SHARED auto doubles_of(Floats x) {
  if constexpr (is_vector<Floats>)
    return __builtin_convertvector(x, typename DoublesOf<Floats>::Type);
  else
    return static_cast<double>(x);
}
template <class Floats, class Doubles>
MONOLITH_SHARED Floats floats_like(const Floats&, Doubles x) {
  if constexpr (is_vector<Floats>)
    return __builtin_convertvector(x, Floats);
  else
    return static_cast<float>(x);
}

}  // namespace monolith

#endif

namespace monolith {

template <class Floats>
MONOLITH_SHARED Floats zero_like(const Floats&) {
  return Floats{};
}

// NaN and infinity are not equal to themselves less themselves.
MONOLITH_SHARED bool is_finite(float x) {
  return x - x == 0;
}

}  // namespace monolith
