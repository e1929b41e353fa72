// Python face of monolith::Routes: releases the GIL, adds no behaviour.
#include "routes.h"

#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
using Floats = Column<float>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T, class Array>
std::vector<std::span<T>> spans(const std::vector<Array>& arrays) {
  std::vector<std::span<T>> found;
  found.reserve(arrays.size());
  for (const auto& array : arrays) found.push_back(as_span(array));
  return found;
}

void make(Routes* self, const Ids& ids, const Ids& sizes, const Ids& widths, std::size_t num_batches,
          std::size_t num_servers) {
  GilReleased unlocked;
  new (self) Routes(as_span(ids), as_span(sizes), as_span(widths), num_batches, num_servers);
}

void spread_numbers(const Routes& routes, const Ids& numbers, const std::vector<Out<std::int64_t>>& to) {
  const auto targets = spans<std::int64_t>(to);
  GilReleased unlocked;
  routes.spread_numbers(as_span(numbers), targets);
}

void spread_rows(const Routes& routes, const Floats& rows, const std::vector<Out<float>>& to) {
  const auto targets = spans<float>(to);
  GilReleased unlocked;
  routes.spread_rows(as_span(rows), targets);
}

void gather_rows(const Routes& routes, const std::vector<Floats>& from, const Out<float>& rows) {
  const auto sources = spans<const float>(from);
  GilReleased unlocked;
  routes.gather_rows(sources, as_span(rows));
}

std::vector<std::int64_t> list(std::span<const std::int64_t> numbers) {
  return {numbers.begin(), numbers.end()};
}

}  // namespace

void bind_routes(nb::module_& m) {
  nb::class_<Routes>(m, "Routes", "The ids of one call, spread over servers. Never changes.")
      .def("__init__", &make, "ids"_a.noconvert(), "sizes"_a.noconvert(), "widths"_a.noconvert(),
           "num_batches"_a, "num_servers"_a,
           "sizes[batch * tables + table] says whose ids are whose; a width for each table.")
      .def_prop_ro(
          "sizes", [](const Routes& self) { return owned(list(self.sizes())); }, nb::rv_policy::move,
          nb::sig("def sizes(self) -> NDArray[numpy.int64]"),
          "Ids of each cell that each server gets, server after server.")
      .def_prop_ro(
          "num_ids", [](const Routes& self) { return list(self.num_ids()); }, "By server.")
      .def_prop_ro(
          "num_floats", [](const Routes& self) { return list(self.num_floats()); }, "By server.")
      .def_prop_ro("floats", &Routes::floats, "Of all rows.")
      .def("spread_numbers", &spread_numbers, "numbers"_a.noconvert(), "to"_a.noconvert(),
           "Write what there is for each server of `numbers`, one per id.")
      .def("spread_rows", &spread_rows, "rows"_a.noconvert(), "to"_a.noconvert(),
           "Write what there is for each server of `rows`, one after another.")
      .def("gather_rows", &gather_rows, "servers"_a.noconvert(), "rows"_a.noconvert(),
           "Write the rows of each server where the caller has them.");
}

}  // namespace monolith
