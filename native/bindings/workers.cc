// Python face of monolith::Workers.
#include "workers.h"

#include <nanobind/stl/shared_ptr.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {

void bind_workers(nb::module_& m) {
  nb::class_<Workers>(m, "Workers", "Threads that share batches with the thread that calls. Thread-safe.")
      .def(nb::init<int>(), "threads"_a, "`threads` counts the caller: 1 starts none.")
      .def_prop_ro("threads", &Workers::threads);
}

}  // namespace monolith
