// How memory crosses between Python and the core: borrowed on the way in, owned
// by the array on the way out. Inputs are bound with .noconvert(), so that no
// array of another type is quietly copied, or an id rounded.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace monolith {

template <class T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Matrix = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

template <class Array>
auto as_span(const Array& array) {
  return std::span(array.data(), array.size());
}

// A numpy array that owns what was in `column`.
template <class T>
nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>> owned(std::vector<T>&& column) {
  auto held = std::make_unique<std::vector<T>>(std::move(column));
  T* const data = held->data();
  const std::size_t size = held->size();
  nanobind::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  held.release();
  return {data, {size}, owner};
}

// The bytes of any contiguous buffer (bytes, memoryview, numpy array), pinned while this lives.
class BorrowedBytes {
 public:
  explicit BorrowedBytes(nanobind::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
  }
  ~BorrowedBytes() { PyBuffer_Release(&view_); }
  BorrowedBytes(const BorrowedBytes&) = delete;
  BorrowedBytes& operator=(const BorrowedBytes&) = delete;

  std::span<const std::byte> span() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

}  // namespace monolith
