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

void write_requests(const Routes& routes, const std::vector<Ids>& numbers, const std::vector<Floats>& rows,
                    const std::vector<Out<std::uint8_t>>& to) {
  const auto number_columns = spans<const std::int64_t>(numbers);
  const auto row_columns = spans<const float>(rows);
  std::vector<std::span<std::byte>> targets;
  targets.reserve(to.size());
  for (const auto& array : to) targets.push_back(std::as_writable_bytes(as_span(array)));
  GilReleased unlocked;
  routes.write_requests(number_columns, row_columns, targets);
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
      .def("request_bytes", &Routes::request_bytes, "numbers"_a, "rows"_a,
           "By server: bytes of a request with so many arrays of a number per id, and of a row per id.")
      .def("write_requests", &write_requests, "numbers"_a.noconvert(), "rows"_a.noconvert(),
           "to"_a.noconvert(), "Write the request to each server: sizes of its cells, numbers, then rows.")
      .def("gather_rows", &gather_rows, "servers"_a.noconvert(), "rows"_a.noconvert(),
           "Write the rows of each server where the caller has them.");
}

}  // namespace monolith
