// Python face of gathering: checks shapes and places, releases the GIL, adds no behaviour.
#include "row_gather.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <span>
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

nb::list gather_rows(const nb::tuple& given, const std::optional<Column<std::int32_t>>& block_of,
                     const Column<std::int64_t>& rows) {
  std::vector<const ColumnBlock*> blocks;
  for (const nb::handle one : given) blocks.push_back(&nb::cast<const ColumnBlock&>(one));
  if (blocks.empty() || (!block_of && blocks.size() > 1))
    throw std::invalid_argument("gather_rows: give a block, or several and the block of each row");
  if (block_of && block_of->size() != rows.size())
    throw std::invalid_argument("gather_rows: there must be a block for each row");
  const std::size_t count = blocks[0]->columns().size();
  std::vector<ParsedColumn> found(count);
  {
    GilReleased unlocked;
    const auto places = as_span(rows);
    const auto which = block_of ? as_span(*block_of) : std::span<const std::int32_t>();
    bool fine = true;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const auto block = static_cast<std::size_t>(which.empty() ? 0 : which[i]);
      fine = fine && block < blocks.size() && static_cast<std::size_t>(places[i]) < blocks[block]->rows();
    }
    if (!fine) throw std::invalid_argument("gather_rows: a place is beyond its block");
    std::vector<const SourceColumn*> column(blocks.size());
    for (std::size_t number = 0; number < count; ++number) {
      for (std::size_t block = 0; block < blocks.size(); ++block) {
        const std::vector<SourceColumn>& columns = blocks[block]->columns();
        if (columns.size() != count || columns[number].type != blocks[0]->columns()[number].type)
          throw std::invalid_argument("gather_rows: blocks have different columns");
        column[block] = &columns[number];
      }
      found[number] = gather_column(column, which, places);
    }
  }
  nb::list out;
  for (ParsedColumn& one : found) {
    nb::object values = one.type == ColumnType::kInt64   ? nb::cast(owned(std::move(one.ints)))
                        : one.type == ColumnType::kFloat ? nb::cast(owned(std::move(one.floats)))
                                                         : nb::cast(owned(std::move(one.bytes)));
    nb::object texts =
        one.type == ColumnType::kBytes ? nb::cast(owned(std::move(one.inner))) : nb::object(nb::none());
    out.append(nb::make_tuple(values, owned(std::move(one.splits)), texts));
  }
  return out;
}

}  // namespace

void bind_row_gather(nb::module_& m) {
  nb::class_<ColumnBlock>(m, "ColumnBlock", "The columns of some records, to gather rows of. Immutable.")
      .def(nb::init<std::size_t, const nb::list&, const nb::tuple&>(), "rows"_a, "columns"_a, "types"_a,
           nb::sig("def __init__(self, rows: int, columns: list[tuple[object, object | None, object]], "
                   "types: tuple[object, object, object]) -> None"),
           "Columns are tensors of (values, splits of texts, splits of rows), which are kept; `types` are "
           "torch's uint8, int64 and float32.")
      .def_prop_ro("types", &ColumnBlock::types, "What the values of each column are.")
      .def_prop_ro("nbytes", &ColumnBlock::bytes, "Memory of all columns.");
  m.def("gather_rows", &gather_rows, "blocks"_a, "block_of"_a.noconvert().none(), "rows"_a.noconvert(),
        nb::sig("def gather_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, "
                "rows: NDArray[numpy.int64]) -> list[tuple[NDArray[numpy.int64] | NDArray[numpy.float32] | "
                "NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]]"),
        "(values, splits of rows, splits of texts) of each column, for these rows of these blocks, in order; "
        "the blocks have the same columns.");
}

}  // namespace monolith
