// Python face of monolith::RawRows, for benchmarks.
#include "raw_rows.h"

#include <nanobind/stl/shared_ptr.h>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Positions = Column<std::uint32_t>;

void gather(const RawRows& raw, const Positions& positions,
            const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& out) {
  const std::size_t copied = out.shape(1);
  if (out.shape(0) != positions.size() || (copied != raw.width() && copied != 2 * raw.width()))
    throw nb::value_error("out must have shape (n, width), or (n, 2 * width) for whole rows");
  GilReleased unlocked;
  raw.gather(as_span(positions), copied, out.data());
}

void update(RawRows& raw, const Positions& positions, const Matrix<float>& gradients) {
  if (gradients.shape(0) != positions.size() || gradients.shape(1) != raw.width())
    throw nb::value_error("gradients must have shape (n, width)");
  GilReleased unlocked;
  raw.update(as_span(positions), gradients.data());
}

}  // namespace

void bind_raw_rows(nb::module_& m) {
  nb::class_<RawRows>(m, "RawRows", "Rows at known positions: the limit a table is measured against.")
      .def(nb::init<std::size_t, std::size_t, std::shared_ptr<Workers>>(), "rows"_a, "width"_a, "workers"_a)
      .def_prop_ro("width", &RawRows::width)
      .def("gather", &gather, "positions"_a.noconvert(), "out"_a.noconvert())
      .def("update", &update, "positions"_a.noconvert(), "gradients"_a.noconvert());
}

}  // namespace monolith
