// Python face of cuda_driver.h: turns Python arguments into the bytes that a kernel takes.
#include "cuda_driver.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

constexpr std::size_t kMostArguments = 32;

// A kernel, and the interned name that tensors are asked by.
struct Launcher {
  CudaKernel kernel;
  nb::object data_ptr = nb::steal(PyUnicode_InternFromString("data_ptr"));
};

// The arguments of one launch, on the stack: the values of scalars, borrowed buffers of structs, and the
// address of each. A launch costs no allocation.
class Packed {
 public:
  Packed() = default;
  ~Packed() {
    for (std::size_t i = 0; i < borrowed_; ++i) PyBuffer_Release(&views_[i]);
  }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  // Reads the arguments and returns their addresses, good for as long as this lives.
  void** pack(const Launcher& launcher, const nb::tuple& arguments) {
    const auto parameters = launcher.kernel.parameters();
    if (arguments.size() != parameters.size() || parameters.size() > kMostArguments)
      throw nb::value_error(("kernel '" + launcher.kernel.name() + "' takes " +
                             std::to_string(parameters.size()) + " arguments, was given " +
                             std::to_string(arguments.size()))
                                .c_str());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      addresses_[i] = &values_[i];
      pack_one(launcher, i, parameters[i], nb::handle(PyTuple_GetItem(arguments.ptr(), Py_ssize_t(i))));
    }
    return addresses_.data();
  }

 private:
  void pack_one(const Launcher& launcher, std::size_t i, CudaKernel::Parameter parameter, nb::handle given) {
    switch (parameter.kind) {
      case ArgumentKind::kPointer:
        return set(i, given.is_none() ? nullptr : address(launcher, given));
      case ArgumentKind::kInt32:
        return set(i, in_range<std::int32_t>(launcher, i, given));
      case ArgumentKind::kUint32:
        return set(i, in_range<std::uint32_t>(launcher, i, given));
      case ArgumentKind::kInt64:
        return set(i, std::int64_t{PyLong_AsLongLong(given.ptr())});
      case ArgumentKind::kUint64:
        return set(i, std::uint64_t{PyLong_AsUnsignedLongLong(given.ptr())});
      case ArgumentKind::kFloat:
        return set(i, static_cast<float>(PyFloat_AsDouble(given.ptr())));
      case ArgumentKind::kStruct: {
        Py_buffer& view = views_[borrowed_];
        if (PyObject_GetBuffer(given.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        ++borrowed_;
        if (parameter.bytes != 0 && static_cast<std::size_t>(view.len) != parameter.bytes)
          throw nb::value_error((where(launcher, i) + "has " + std::to_string(parameter.bytes) +
                                 " bytes, was given " + std::to_string(view.len))
                                    .c_str());
        addresses_[i] = view.buf;
      }
    }
  }

  template <class Value>
  void set(std::size_t i, Value value) {
    // PyLong_As... and PyFloat_As... return -1 for an error, too.
    if (value == static_cast<Value>(-1) && PyErr_Occurred() != nullptr) throw nb::python_error();
    std::memcpy(&values_[i], &value, sizeof value);
  }
  void set(std::size_t i, void* value) { std::memcpy(&values_[i], &value, sizeof value); }

  template <class Value>
  static Value in_range(const Launcher& launcher, std::size_t i, nb::handle given) {
    const long long value = PyLong_AsLongLong(given.ptr());
    if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (!std::in_range<Value>(value))
      throw nb::value_error((where(launcher, i) + "cannot be " + std::to_string(value)).c_str());
    return static_cast<Value>(value);
  }

  // The address of a tensor's first element, or an address as an int.
  static void* address(const Launcher& launcher, nb::handle given) {
    nb::object number = nb::borrow(given);
    if (!PyLong_Check(given.ptr())) {
      number = nb::steal(PyObject_CallMethodObjArgs(given.ptr(), launcher.data_ptr.ptr(), nullptr));
      if (!number.is_valid()) throw nb::python_error();
    }
    void* const found = PyLong_AsVoidPtr(number.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    return found;
  }

  static std::string where(const Launcher& launcher, std::size_t i) {
    return "kernel '" + launcher.kernel.name() + "': argument " + std::to_string(i) + " ";
  }

  std::array<std::uint64_t, kMostArguments> values_;
  std::array<void*, kMostArguments> addresses_;
  std::array<Py_buffer, kMostArguments> views_;
  std::size_t borrowed_ = 0;  // of views_
};

void launch(const Launcher& launcher, unsigned blocks, unsigned threads, std::uintptr_t stream,
            const nb::tuple& arguments) {
  Packed packed;
  void** const addresses = packed.pack(launcher, arguments);
  // A launch waits while the device's queue is full.
  GilReleased unlocked;
  launcher.kernel.launch(blocks, threads, reinterpret_cast<void*>(stream), addresses);
}

}  // namespace

void bind_cuda_driver(nb::module_& m) {
  nb::exception<CudaError>(m, "CudaError", PyExc_RuntimeError);

  nb::class_<Launcher>(m, "CudaKernel", "A kernel with typed parameters. Thread-safe.")
      .def("launch", &launch, "blocks"_a, "threads"_a, "stream"_a, "arguments"_a,
           nb::sig("def launch(self, blocks: int, threads: int, stream: int, arguments: tuple[object, ...]) "
                   "-> None"),
           "Put a launch on a stream, by its handle, and return. A pointer is given as a tensor, an address "
           "or "
           "None; a struct as a buffer of its bytes.");

  nb::class_<CudaModule>(m, "CudaModule", "The kernels of a compiled image.")
      .def(
          "kernel",
          [](const CudaModule& module, const std::string& name, const std::string& signature) {
            return Launcher{module.kernel(name, signature)};
          },
          "name"_a, "signature"_a,
          "The kernel of that name. `signature` has a letter for each parameter, as in Python's struct "
          "module: "
          "P pointer, i int32, I uint32, q int64, Q uint64, f float; s is a struct.");

  nb::class_<CudaDriver>(m, "CudaDriver", "The CUDA driver, on one device. Thread-safe.")
      .def(nb::new_([](const std::string& library, int device) {
             return std::make_shared<CudaDriver>(CudaFunctions::open(library), device);
           }),
           "library"_a, "device"_a, "Open the driver's library and a device by its number.")
      .def(
          "load",
          [](std::shared_ptr<CudaDriver> driver, const nb::bytes& image) {
            return CudaModule(std::move(driver), image.c_str());
          },
          "image"_a, "Load a cubin, or PTX.");
}

}  // namespace monolith
