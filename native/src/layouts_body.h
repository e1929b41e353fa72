// What the parts of Layouts share: how they refuse, share work out, and move stretches of floats.
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "layouts.h"

namespace monolith {

[[noreturn]] inline void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

// The usual widths spelled out, so that a stretch is moved in a few instructions; 0 is any.
template <class Work>
void with_width(int width, Work&& work) {
  switch (width) {
    case 1:
      return work(std::integral_constant<int, 1>());
    case 4:
      return work(std::integral_constant<int, 4>());
    case 8:
      return work(std::integral_constant<int, 8>());
    case 16:
      return work(std::integral_constant<int, 16>());
    case 32:
      return work(std::integral_constant<int, 32>());
    case 64:
      return work(std::integral_constant<int, 64>());
    default:
      return work(std::integral_constant<int, 0>());
  }
}

// Neither stretch may lie on the other: only then does a compiler load all of it before it stores any.
template <int kWidth>
void add(float* __restrict to, const float* __restrict from, int any_width) {
  const int width = kWidth != 0 ? kWidth : any_width;
  for (int i = 0; i < width; ++i) to[i] += from[i];
}

template <int kWidth>
void add_scaled(float* __restrict to, const float* __restrict from, float scale, int any_width) {
  const int width = kWidth != 0 ? kWidth : any_width;
  for (int i = 0; i < width; ++i) to[i] += from[i] * scale;
}

template <class Each>
void Layouts::spread(std::size_t count, std::size_t grain, Each&& each) const {
  spread_out(workers_.get(), count, grain, each);
}

}  // namespace monolith
