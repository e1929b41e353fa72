// Python face of monolith::RawRows, for benchmarks.
#include "raw_rows.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Positions = Column<std::uint32_t>;

void check(const RawRows& raw, const Positions& positions, std::size_t rows, std::size_t width) {
  if (rows != positions.size() || width != raw.width())
    throw nb::value_error("rows must have shape (n, width)");
  const auto all = as_span(positions);
  if (!all.empty() && *std::max_element(all.begin(), all.end()) >= raw.rows())
    throw nb::value_error("a position is past the last row");
}

void gather(const RawRows& raw, const Positions& positions,
            const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& out) {
  check(raw, positions, out.shape(0), out.shape(1));
  nb::gil_scoped_release unlocked;
  raw.gather(as_span(positions), out.data());
}

void update(RawRows& raw, const Positions& positions, const Matrix<float>& gradients) {
  check(raw, positions, gradients.shape(0), gradients.shape(1));
  nb::gil_scoped_release unlocked;
  raw.update(as_span(positions), gradients.data());
}

}  // namespace

void bind_raw_rows(nb::module_& m) {
  nb::class_<RawRows>(m, "RawRows", "Rows at known positions: the limit a table is measured against.")
      .def(nb::init<std::size_t, std::size_t, std::shared_ptr<Workers>>(), "rows"_a, "width"_a, "workers"_a)
      .def("gather", &gather, "positions"_a.noconvert(), "out"_a.noconvert())
      .def("update", &update, "positions"_a.noconvert(), "gradients"_a.noconvert());
}

}  // namespace monolith
