// Arrays of KeptMemory as numpy sees them: the array owns its block, which goes back when it is freed.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

#include "kept_memory.h"

namespace monolith {

template <class T>
nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>> owned(std::unique_ptr<KeptArray<T>> held) {
  T* const data = held->data();
  const std::size_t size = held->size();
  nanobind::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<KeptArray<T>*>(p); });
  held.release();
  return {data, {size}, owner};
}

}  // namespace monolith
