// Python face of gathering: checks shapes and places, releases the GIL, adds no behaviour.
#include "row_gather.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "column_block.h"
#include "permutation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

nb::list gather_rows(const nb::tuple& blocks, const std::optional<Column<std::int32_t>>& block_of,
                     const Column<std::int64_t>& rows,
                     const std::optional<std::vector<std::size_t>>& columns) {
  const RowPlaces places(blocks, block_of, rows);
  std::vector<ParsedColumn> found;
  {
    GilReleased unlocked;
    places.check();
    for (std::size_t i = 0; i < (columns ? columns->size() : places.columns()); ++i)
      found.push_back(
          gather_column(places.column(columns ? (*columns)[i] : i), places.which(), places.rows()));
  }
  nb::list out;
  nb::object counted;  // the splits of all columns with one value in each row
  for (ParsedColumn& one : found) {
    nb::object values = one.type == ColumnType::kInt64   ? nb::cast(owned(std::move(one.ints)))
                        : one.type == ColumnType::kFloat ? nb::cast(owned(std::move(one.floats)))
                                                         : nb::cast(owned(std::move(one.bytes)));
    nb::object texts =
        one.type == ColumnType::kBytes ? nb::cast(owned(std::move(one.inner))) : nb::object(nb::none());
    if (one.splits.empty() && !counted.is_valid()) {
      std::vector<std::int64_t> numbers(rows.size() + 1);
      std::iota(numbers.begin(), numbers.end(), std::int64_t{0});
      counted = nb::cast(owned(std::move(numbers)));
    }
    out.append(
        nb::make_tuple(values, one.splits.empty() ? counted : nb::cast(owned(std::move(one.splits))), texts));
  }
  return out;
}

auto permutation_of(std::size_t count, std::uint64_t state) {
  std::vector<std::int64_t> order;
  {
    GilReleased unlocked;
    order = permutation(count, state);
  }
  return owned(std::move(order));
}

}  // namespace

void bind_row_gather(nb::module_& m) {
  nb::class_<ColumnBlock>(m, "ColumnBlock", "The columns of some records, to gather rows of. Immutable.")
      .def(nb::init<std::size_t, const nb::list&, const nb::tuple&>(), "rows"_a, "columns"_a, "types"_a,
           nb::sig("def __init__(self, rows: int, columns: list[tuple[object, object | None, object]], "
                   "types: tuple[object, object, object]) -> None"),
           "Columns are tensors of (values, splits of texts, splits of rows), which are kept; `types` are "
           "torch's uint8, int64 and float32.")
      .def(
          "mark",
          [](ColumnBlock& self, nb::object key, const Column<std::uint8_t>& found) {
            self.mark(std::move(key), {found.data(), found.data() + found.size()});
          },
          "key"_a, "found"_a.noconvert(),
          nb::sig("def mark(self, key: object, found: NDArray[numpy.uint8]) -> None"),
          "Keep what was found about each row for `marked_rows`, before another thread has the block.")
      .def("__len__", &ColumnBlock::rows)
      .def_prop_ro("types", &ColumnBlock::types, "What the values of each column are.")
      .def_prop_ro("nbytes", &ColumnBlock::bytes, "Memory of all columns.");
  m.def("gather_rows", &gather_rows, "blocks"_a, "block_of"_a.noconvert().none(), "rows"_a.noconvert(),
        "columns"_a.none() = nb::none(),
        nb::sig("def gather_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, "
                "rows: NDArray[numpy.int64], columns: Sequence[int] | None = None) -> "
                "list[tuple[NDArray[numpy.int64] | NDArray[numpy.float32] | "
                "NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]]"),
        "(values, splits of rows, splits of texts) of each column, or of some, for these rows of these "
        "blocks, in "
        "order; the blocks have the same columns.");
  m.def(
      "permutation", &permutation_of, "count"_a, "state"_a,
      nb::sig("def permutation(count: int, state: int) -> NDArray[numpy.int64]"),
      "The numbers from 0 to `count` - 1 in an order that `state` decides: by mix(mix(i ^ state) + state).");
}

}  // namespace monolith
