// Python face of monolith::TouchedKeySet: releases the GIL, adds no behaviour.
#include <nanobind/stl/shared_ptr.h>

#include "arrays.h"
#include "bindings.h"
#include "touched_key_set.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

std::size_t insert(TouchedKeySet& set, const Column<std::int64_t>& ids) {
  GilReleased unlocked;
  return set.insert(as_span(ids));
}

nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>> steal(TouchedKeySet& set) {
  std::vector<std::int64_t> keys;
  {
    GilReleased unlocked;
    keys = set.steal();
  }
  return owned(std::move(keys));
}

}  // namespace

void bind_touched_keys(nb::module_& m) {
  nb::class_<TouchedKeySet>(m, "TouchedKeySet", "The ids changed since they were last taken. Thread-safe.")
      .def(nb::init<std::size_t>(), "capacity"_a = TouchedKeySet::kDefaultCapacity)
      .def("insert", &insert, "ids"_a.noconvert(),
           "Add ids; a set past its capacity is emptied first. Returns how many keys that dropped.")
      .def("steal", &steal, "Take all keys, as int64 in no order.")
      .def("__len__", &TouchedKeySet::size, nb::call_guard<GilReleased>())
      .def_prop_ro("capacity", &TouchedKeySet::capacity)
      .def_prop_ro("lost", &TouchedKeySet::lost, "Keys dropped because there were too many, ever.");
}

}  // namespace monolith
