// Rows of a scan, as the arrays that Python gets.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <utility>

#include "table.h"

namespace monolith {

template <class T>
nanobind::ndarray<nanobind::numpy, T> column(std::unique_ptr<T[]> data,
                                             std::initializer_list<std::size_t> shape) {
  T* memory = data.get();
  nanobind::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  data.release();
  return nanobind::ndarray<nanobind::numpy, T>(memory, shape, owner);
}

// (ids, times, values, state, cursor or None).
inline nanobind::tuple columns_of(Chunk chunk, std::size_t dim, std::size_t state_dim) {
  const std::size_t rows = chunk.rows;
  nanobind::object next = chunk.done ? nanobind::none() : nanobind::cast(chunk.cursor);
  return nanobind::make_tuple(column(std::move(chunk.ids), {rows}), column(std::move(chunk.times), {rows}),
                              column(std::move(chunk.values), {rows, dim}),
                              column(std::move(chunk.state), {rows, state_dim}), next);
}

}  // namespace monolith
