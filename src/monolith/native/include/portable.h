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

}  // namespace monolith

#else

#include <bit>
#include <cmath>
#include <cstdint>

#define MONOLITH_SHARED inline
// Rules are loops over values with a lambda for each value; a lambda behind a call would not become vector
// code.
#define MONOLITH_INLINE __attribute__((always_inline))

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
inline float root(float x) {
  return std::sqrt(x);
}
inline double root(double x) {
  return std::sqrt(x);
}
inline float magnitude_of(float x) {
  return std::abs(x);
}
inline float with_sign(float magnitude, float sign) {
  return std::copysign(magnitude, sign);
}
inline float whole_part(float x) {
  return std::trunc(x);
}
inline float tanh_of(float x) {
  return std::tanh(x);
}

}  // namespace monolith

#endif

namespace monolith {

// NaN and infinity are not equal to themselves less themselves.
MONOLITH_SHARED bool is_finite(float x) {
  return x - x == 0;
}

}  // namespace monolith
