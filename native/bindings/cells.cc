// Python face of cells.h: checks nothing, releases the GIL, adds no behaviour.
#include "cells.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
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

using Texts = std::tuple<Column<std::uint8_t>, Splits>;

template <class Array>
auto span_of(const std::optional<Array>& array) -> decltype(as_span(*array)) {
  return array ? as_span(*array) : decltype(as_span(*array))();
}

nb::tuple pack(
    const std::vector<std::tuple<RawIds::Kind, std::optional<Texts>, std::optional<Splits>,
                                 std::optional<Column<float>>, Splits, std::optional<Column<double>>,
                                 std::optional<char>, std::optional<std::uint32_t>>>& features) {
  std::vector<RawIds> raw;
  for (const auto& [kind, texts, ints, floats, rows, boundaries, separator, slot] : features) {
    RawIds one{kind,      {},    span_of(ints), span_of(floats), as_span(rows), span_of(boundaries),
               separator, {slot}};
    if (texts)
      one.texts = {std::as_bytes(as_span(std::get<0>(*texts))), as_span(std::get<1>(*texts)), as_span(rows)};
    if ((kind == RawIds::Kind::kHashed || kind == RawIds::Kind::kWholeTexts) != texts.has_value())
      throw std::invalid_argument("texts go with the kinds that read texts, and with no others");
    raw.push_back(one);
  }
  PackedIds found;
  {
    nb::gil_scoped_release unlocked;
    found = pack_ids(raw);
  }
  return nb::make_tuple(owned(std::move(found.ids)), owned(std::move(found.splits)), found.fine);
}

bool pack_floats(
    const std::vector<std::tuple<std::optional<Splits>, std::optional<Column<float>>, Splits>>& columns,
    std::size_t rows, const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& out) {
  std::vector<RawNumbers> raw;
  for (const auto& [ints, floats, splits] : columns)
    raw.push_back({span_of(ints), span_of(floats), as_span(splits)});
  nb::gil_scoped_release unlocked;
  return pack_numbers(raw, rows, as_span(out));
}

}  // namespace

void bind_cells(nb::module_& m) {
  nb::enum_<RawIds::Kind>(m, "RawKind", "What a raw column of ids holds, and what becomes of it.")
      .value("HASHED", RawIds::Kind::kHashed)
      .value("WHOLE_TEXTS", RawIds::Kind::kWholeTexts)
      .value("INTS", RawIds::Kind::kInts)
      .value("INT_BUCKETS", RawIds::Kind::kIntBuckets)
      .value("FLOAT_BUCKETS", RawIds::Kind::kFloatBuckets);
  m.def("pack_ids", &pack, "features"_a,
        nb::sig("def pack_ids(features: Sequence[tuple[RawKind, tuple[NDArray[numpy.uint8], "
                "NDArray[numpy.int64]] | None, NDArray[numpy.int64] | None, NDArray[numpy.float32] | None, "
                "NDArray[numpy.int64], NDArray[numpy.float64] | None, str | None, int | None]]) -> "
                "tuple[NDArray[numpy.int64], NDArray[numpy.int64], bool]"),
        "(ids, splits, fine) of features: (kind, (bytes, splits), ints, floats, rows, boundaries, separator, "
        "slot). Where something cannot be read, not fine, and the rest means nothing.");
  m.def(
      "pack_numbers", &pack_floats, "columns"_a, "rows"_a, "out"_a.noconvert(),
      nb::sig("def pack_numbers(columns: Sequence[tuple[NDArray[numpy.int64] | None, NDArray[numpy.float32] "
              "| None, NDArray[numpy.int64]]], rows: int, out: NDArray[numpy.float32]) -> bool"),
      "Copy columns, (ints, floats, rows), of one finite number per row; False where one has others.");
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
