// Python face of monolith::Histories: checks shapes, releases the GIL, adds no behaviour.
#include "histories.h"

#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "column_block.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

// (values, splits of rows, splits of texts) of each column. Those of the same splits have one array of them.
nb::list as_arrays(std::vector<ParsedColumn>&& columns) {
  nb::list out;
  nb::object splits;
  std::vector<std::int64_t> known;
  for (ParsedColumn& one : columns) {
    nb::object values = one.type == ColumnType::kInt64   ? nb::cast(owned(std::move(one.ints)))
                        : one.type == ColumnType::kFloat ? nb::cast(owned(std::move(one.floats)))
                                                         : nb::cast(owned(std::move(one.bytes)));
    nb::object texts =
        one.type == ColumnType::kBytes ? nb::cast(owned(std::move(one.inner))) : nb::object(nb::none());
    if (!splits.is_valid() || known != one.splits) {
      known = one.splits;
      splits = nb::cast(owned(std::move(one.splits)));
    }
    out.append(nb::make_tuple(values, splits, texts));
  }
  return out;
}

nb::tuple build(Histories& histories, const ColumnBlock& block, const Column<std::int64_t>& seconds,
                const Column<std::uint8_t>& roles) {
  Histories::Built built;
  {
    GilReleased unlocked;
    built = histories.build(block.columns(), as_span(seconds), as_span(roles));
  }
  return nb::make_tuple(as_arrays(std::move(built.columns)), owned(std::move(built.entered)), built.left_out);
}

void enter(Histories& histories, const ColumnBlock& block) {
  GilReleased unlocked;
  histories.enter(block.columns());
}

nb::list dump(const Histories& histories) {
  std::vector<ParsedColumn> columns;
  {
    GilReleased unlocked;
    columns = histories.dump();
  }
  return as_arrays(std::move(columns));
}

}  // namespace

void bind_histories(nb::module_& m) {
  nb::class_<Histories>(m, "Histories", "The last events of each user, by event time. Not thread-safe.")
      .def(nb::init<std::size_t, std::size_t, std::vector<ColumnType>>(), "max"_a, "max_users"_a, "types"_a,
           "`types` are those of the user and of each value.")
      .def(
          "build", &build, "block"_a, "seconds"_a.noconvert(), "roles"_a.noconvert(),
          nb::sig("def build(self, block: ColumnBlock, seconds: NDArray[numpy.int64], roles: "
                  "NDArray[numpy.uint8]) -> tuple[list[tuple[NDArray[numpy.int64] | NDArray[numpy.float32] | "
                  "NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]], "
                  "NDArray[numpy.int64], int]"),
          "The history of each record as (values, splits of rows, splits of texts) of each value, the "
          "records "
          "that entered, and how many lacked a value. The block has the user and the values of each record; "
          "bit 0 of a role is whether it has a history, bit 1 whether it enters.")
      .def("enter", &enter, "block"_a, "Enters users with their seconds and values, as `dump` returns them.")
      .def("dump", &dump,
           nb::sig("def dump(self) -> list[tuple[NDArray[numpy.int64] | NDArray[numpy.float32] | "
                   "NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]]"),
           "The users in the order of their last events, the seconds of their events, and each value.")
      .def_prop_ro("users", &Histories::users, "How many users have events.")
      .def_prop_ro("events", &Histories::events, "How many events all users have.")
      .def_prop_ro("nbytes", &Histories::bytes, "Memory of all events, about.");
}

}  // namespace monolith
