// Python face of cells.h: checks nothing, releases the GIL, adds no behaviour.
#include "cells.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Splits = Column<std::int64_t>;

template <class T>
nb::tuple as_tuple(Lists<T>&& lists) {
  return nb::make_tuple(owned(std::move(lists.values)), owned(std::move(lists.splits)),
                        owned(std::move(lists.bad)));
}

template <class Read>
nb::tuple with_texts(nb::handle text, const Splits& splits, const Splits& rows, Read&& read) {
  const BorrowedBytes bytes(text);
  std::invoke_result_t<Read, TextColumn> found;
  {
    nb::gil_scoped_release unlocked;
    found = read(TextColumn{bytes.span(), as_span(splits), as_span(rows)});
  }
  return as_tuple(std::move(found));
}

nb::tuple cross(const std::vector<std::tuple<Splits, Splits>>& columns, std::size_t most,
                std::optional<std::uint32_t> slot) {
  std::vector<IdColumn> parts;
  for (const auto& [ids, splits] : columns) parts.push_back({as_span(ids), as_span(splits)});
  Lists<std::int64_t> found;
  {
    nb::gil_scoped_release unlocked;
    found = cross_cells(parts, most, {slot});
  }
  return as_tuple(std::move(found));
}

}  // namespace

void bind_cells(nb::module_& m) {
  m.def(
      "hash_cells",
      [](nb::handle text, const Splits& splits, const Splits& rows, std::optional<char> separator,
         std::optional<std::uint32_t> slot) {
        return with_texts(text, splits, rows,
                          [&](const TextColumn& column) { return hash_cells(column, separator, {slot}); });
      },
      "text"_a, "splits"_a.noconvert(), "rows"_a.noconvert(), "separator"_a.none(), "slot"_a.none(),
      nb::sig("def hash_cells(text: object, splits: NDArray[numpy.int64], rows: NDArray[numpy.int64], "
              "separator: str | None, slot: int | None) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], "
              "NDArray[numpy.int64]]"),
      "(ids, splits, bad): an id for each item of each text, a fid of version 2 where there is a slot.");
  m.def(
      "read_whole_cells",
      [](nb::handle text, const Splits& splits, const Splits& rows, std::optional<char> separator) {
        return with_texts(text, splits, rows,
                          [&](const TextColumn& column) { return read_whole_cells(column, separator); });
      },
      "text"_a, "splits"_a.noconvert(), "rows"_a.noconvert(), "separator"_a.none(),
      nb::sig("def read_whole_cells(text: object, splits: NDArray[numpy.int64], rows: NDArray[numpy.int64], "
              "separator: str | None) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], "
              "NDArray[numpy.int64]]"),
      "(values, splits, bad): the whole numbers that texts hold, and the rows where some are none.");
  m.def(
      "read_number_cells",
      [](nb::handle text, const Splits& splits, const Splits& rows, std::optional<char> separator) {
        return with_texts(text, splits, rows,
                          [&](const TextColumn& column) { return read_number_cells(column, separator); });
      },
      "text"_a, "splits"_a.noconvert(), "rows"_a.noconvert(), "separator"_a.none(),
      nb::sig("def read_number_cells(text: object, splits: NDArray[numpy.int64], rows: NDArray[numpy.int64], "
              "separator: str | None) -> tuple[NDArray[numpy.float32], NDArray[numpy.int64], "
              "NDArray[numpy.int64]]"),
      "(values, splits, bad): the numbers that texts hold, and the rows where some are none.");
  m.def("cross_cells", &cross, "columns"_a, "most"_a, "slot"_a.none(),
        nb::sig("def cross_cells(columns: Sequence[tuple[NDArray[numpy.int64], NDArray[numpy.int64]]], most: "
                "int, slot: int | None) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], "
                "NDArray[numpy.int64]]"),
        "(ids, splits, bad): an id for every way to take one id of each of the columns, (ids, splits) each.");
}

}  // namespace monolith
