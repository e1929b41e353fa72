// Python face of monolith::Workers, and of the memory that calls keep.
#include "workers.h"

#include <nanobind/stl/shared_ptr.h>

#include <memory>

#include "bindings.h"
#include "kept_arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

nb::ndarray<nb::numpy, float, nb::ndim<1>> floats(KeptMemory& memory, std::size_t size) {
  return owned(std::make_unique<KeptArray<float>>(memory, size));
}

}  // namespace

void bind_workers(nb::module_& m) {
  nb::class_<Workers>(m, "Workers", "Threads that share batches with the thread that calls. Thread-safe.")
      .def(nb::init<int>(), "threads"_a, "`threads` counts the caller: 1 starts none.")
      .def_prop_ro("threads", &Workers::threads)
      .def("fix", &Workers::fix, "threads"_a,
           "Give calls so many threads from now on; 0, as at first, as many as were found to be fastest.");

  nb::class_<KeptMemory>(m, "KeptMemory", "Large arrays whose memory is used again. Thread-safe.")
      .def(nb::new_([] { return std::make_shared<KeptMemory>(); }))
      .def("floats", &floats, "size"_a, nb::sig("def floats(self, size: int) -> NDArray[numpy.float32]"),
           "An array that is not initialised; its memory is reused for the next one once it is freed.")
      .def_prop_ro("bytes", &KeptMemory::bytes, "Bytes of idle memory, ready for the next array.");
}

}  // namespace monolith
