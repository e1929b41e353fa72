// Tensors of torch as borrowed memory: a pointer and a length, asked of the tensor itself. A numpy
// view of one costs four times as much, which counts where a batch has a hundred short columns.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

namespace monolith {

// Reads tensors by torch's types, which are handed over: the core does not know torch.
class TensorReader {
 public:
  TensorReader(nanobind::object uint8, nanobind::object int64, nanobind::object float32)
      : uint8_(std::move(uint8)), int64_(std::move(int64)), float32_(std::move(float32)) {}

  template <class T>
  bool holds(nanobind::handle tensor) const {
    return nanobind::getattr(tensor, dtype_).is(type<T>());
  }

  // The values of a tensor, as long as it lives; none where they are of another type, not on the CPU or not
  // one after the other.
  template <class T>
  std::optional<std::span<const T>> read(nanobind::handle tensor) const {
    if (!holds<T>(tensor) || !nanobind::getattr(tensor, is_cpu_).is(nanobind::handle(Py_True)) ||
        !call(tensor, is_contiguous_).is(nanobind::handle(Py_True)))
      return std::nullopt;
    const nanobind::object address = call(tensor, data_ptr_), count = call(tensor, numel_);
    const auto* const data = static_cast<const T*>(PyLong_AsVoidPtr(address.ptr()));
    const Py_ssize_t size = PyLong_AsSsize_t(count.ptr());
    if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
    return std::span(data, static_cast<std::size_t>(size));
  }

 private:
  template <class T>
  const nanobind::object& type() const {
    if constexpr (std::is_same_v<T, std::byte>)
      return uint8_;
    else if constexpr (std::is_same_v<T, float>)
      return float32_;
    else {
      static_assert(std::is_same_v<T, std::int64_t>);
      return int64_;
    }
  }

  static nanobind::object call(nanobind::handle object, const nanobind::str& method) {
    PyObject* const found = PyObject_CallMethodObjArgs(object.ptr(), method.ptr(), nullptr);
    if (found == nullptr) throw nanobind::python_error();
    return nanobind::steal(found);
  }

  static nanobind::str interned(const char* name) {
    return nanobind::steal<nanobind::str>(PyUnicode_InternFromString(name));
  }

  nanobind::object uint8_, int64_, float32_;
  nanobind::str dtype_ = interned("dtype"), is_cpu_ = interned("is_cpu"),
                is_contiguous_ = interned("is_contiguous"), data_ptr_ = interned("data_ptr"),
                numel_ = interned("numel");
};

}  // namespace monolith
