// Python face of cells.h: checks nothing, releases the GIL, adds no behaviour.
#include "cells.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "column_block.h"
#include "row_pack.h"
#include "tensors.h"

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
    GilReleased unlocked;
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
    GilReleased unlocked;
    found = cross_cells(parts, most, {slot});
  }
  return as_tuple(std::move(found));
}

template <class Array>
auto span_of(const std::optional<Array>& array) -> decltype(as_span(*array)) {
  return array ? as_span(*array) : decltype(as_span(*array))();
}

// The features of a spec that are packed together, and how each is read by what its column holds.
class IdPacker {
 public:
  using Kind = std::optional<RawIds::Kind>;
  using Boundaries = std::vector<double>;
  // Kinds of texts, ints and floats; boundaries for ints and for floats; separator and slot.
  using Feature =
      std::tuple<Kind, Kind, Kind, Boundaries, Boundaries, std::optional<char>, std::optional<std::uint32_t>>;

  // The members of `TimePlan`.
  using TimesPlan = std::tuple<std::int64_t, bool, std::int64_t, std::int64_t>;
  // Of columns: kind, how IDs are read, and how times are. Then the other members of `RowFeature`.
  using List =
      std::tuple<std::vector<std::tuple<RowColumn::Kind, Feature, TimesPlan>>, std::size_t, bool, bool>;

  IdPacker(std::vector<Feature> features, std::vector<List> lists, nb::object uint8, nb::object int64,
           nb::object float32)
      : features_(std::move(features)),
        lists_(std::move(lists)),
        tensors_(std::move(uint8), std::move(int64), std::move(float32)) {}

  // (ids, splits), or None if something is odd.
  nb::object pack(const nb::list& columns) const {
    if (columns.size() != features_.size())
      throw std::invalid_argument("pack: there must be a column for each feature");
    std::vector<RawIds> raw;
    raw.reserve(features_.size());
    for (std::size_t i = 0; i < features_.size(); ++i) {
      const auto column = nb::cast<nb::tuple>(columns[i]);
      if (column.size() != 3) throw std::invalid_argument("pack: a column is (values, texts, rows)");
      const std::optional<RawIds> one = read(features_[i], column[0], column[1], column[2]);
      if (!one) return nb::none();
      raw.push_back(*one);
    }
    PackedIds found;
    {
      GilReleased unlocked;
      found = pack_ids(raw);
    }
    if (!found.fine) return nb::none();
    return nb::make_tuple(owned(std::move(found.ids)), owned(std::move(found.splits)));
  }

  // Of numbers: column, kind, how many a row has, and whether texts are read, with what between those of a
  // list. Of times: column, and the members of `TimePlan`.
  using Numbers = std::tuple<std::size_t, RowNumbers, std::size_t, bool, std::optional<char>>;
  using Times = std::tuple<std::size_t, std::int64_t, bool, std::int64_t, std::int64_t>;

  // (ids, splits, numbers, how many rows of each lack one, times, lists). Instead of splits: None if an id is
  // odd, True if every cell has one id, since the caller then has them already. Times are (seconds, splits
  // or None if each row has one, forms); None if one is odd, or none are read. Lists are (how many of them
  // were packed behind the IDs: all before the first odd one; the forms of times of each of their columns;
  // weights of all IDs, or None if all are 1).
  nb::tuple pack_rows(const nb::tuple& blocks, const std::optional<Column<std::int32_t>>& block_of,
                      const Column<std::int64_t>& rows, const std::vector<std::size_t>& ids,
                      const std::vector<Numbers>& numbers, const std::optional<Times>& times,
                      const std::vector<std::vector<std::size_t>>& lists) const {
    if (ids.size() != features_.size() || lists.size() > lists_.size())
      throw std::invalid_argument("pack_rows: there must be a column for each feature");
    const RowPlaces places(blocks, block_of, rows);
    const std::size_t size = rows.size();
    WeightedIds weighted;
    PackedIds& packed = weighted.ids;
    std::vector<float> out;
    std::vector<std::int64_t> missing;
    std::optional<RowTimes> read_times;
    std::vector<std::uint32_t> forms;
    std::size_t listed = 0;
    bool one_each = false;
    {
      GilReleased unlocked;
      places.check();
      packed.ids.reserve(ids.size() * size);
      packed.splits.reserve(ids.size() * size + 1);
      packed.splits.push_back(0);
      for (std::size_t i = 0; i < ids.size() && packed.fine; ++i) {
        const std::vector<const SourceColumn*> column = places.column(ids[i]);
        const std::optional<RawIds> feature = plan(features_[i], column[0]->type);
        packed.fine = feature && add_row_ids(*feature, column, places.which(), places.rows(), packed);
      }
      if (times) {
        const auto& [number, per_second, iso_texts, oldest, latest] = *times;
        read_times = read_row_times({per_second, iso_texts, oldest, latest}, places.column(number),
                                    places.which(), places.rows());
      }
      for (; listed < lists.size() && packed.fine; ++listed) {
        std::vector<std::vector<const SourceColumn*>> columns;
        for (const std::size_t number : lists[listed]) columns.push_back(places.column(number));
        const std::optional<RowFeature> feature = plan(lists_[listed], columns);
        if (!feature || !add_row_feature(*feature, columns, places.which(), places.rows(),
                                         read_times ? &*read_times : nullptr, weighted, forms))
          break;
      }
      if (weighted.weights) weighted.weights->resize(packed.ids.size(), 1.0F);
      one_each = packed.ids.size() + 1 == packed.splits.size() &&
                 std::adjacent_find(packed.splits.begin(), packed.splits.end()) == packed.splits.end();
      std::size_t total = 0;
      for (const auto& one : numbers) total += std::get<2>(one) * size;
      out.resize(total);
      std::span<float> to(out);
      for (const auto& [number, kind, width, reads_texts, separator] : numbers) {
        const NumberPlan plan{kind, width, reads_texts, separator};
        missing.push_back(copy_row_numbers(plan, places.column(number), places.which(), places.rows(),
                                           to.first(width * size)));
        to = to.subspan(width * size);
      }
    }
    nb::object splits = nb::none();
    if (packed.fine) splits = one_each ? nb::cast(true) : nb::cast(owned(std::move(packed.splits)));
    nb::object seconds = nb::none();
    if (read_times) {
      nb::object of_rows = nb::none();
      if (!read_times->splits.empty()) of_rows = nb::cast(owned(std::move(read_times->splits)));
      seconds = nb::make_tuple(owned(std::move(read_times->seconds)), of_rows, read_times->forms);
    }
    nb::object weights = nb::none();
    if (weighted.weights) weights = nb::cast(owned(std::move(*weighted.weights)));
    return nb::make_tuple(owned(std::move(packed.ids)), splits, owned(std::move(out)), missing, seconds,
                          nb::make_tuple(listed, forms, weights));
  }

 private:
  // How a feature is read of a column of a type, without its values; none if it cannot be.
  static std::optional<RawIds> plan(const Feature& feature, ColumnType type) {
    const auto& [of_texts, of_ints, of_floats, exact, rounded, separator, slot] = feature;
    const bool whole = type == ColumnType::kInt64;
    const Kind kind = type == ColumnType::kBytes ? of_texts : whole ? of_ints : of_floats;
    if (!kind) return std::nullopt;
    return RawIds{*kind, {}, {}, {}, {}, whole ? exact : rounded, separator, {slot}};
  }

  static std::optional<RowFeature> plan(const List& list,
                                        std::span<const std::vector<const SourceColumn*>> sources) {
    const auto& [columns, most, keeps_last, steps] = list;
    if (columns.size() != sources.size())
      throw std::invalid_argument("pack_rows: a list needs a source for each of its columns");
    RowFeature found{{}, most, keeps_last, steps};
    found.columns.reserve(columns.size());
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const auto& [kind, feature, times] = columns[i];
      RowColumn& column = found.columns.emplace_back();
      column.kind = kind;
      const auto& [per_second, iso_texts, oldest, latest] = times;
      column.times = {per_second, iso_texts, oldest, latest};
      // Times are read as such, and are whole numbers when they become IDs.
      const bool ids = kind == RowColumn::Kind::kIds;
      const std::optional<RawIds> raw = plan(feature, ids ? sources[i][0]->type : ColumnType::kInt64);
      if (!raw) return std::nullopt;
      column.ids = *raw;
    }
    return found;
  }

  std::optional<RawIds> read(const Feature& feature, nb::handle values, nb::handle texts,
                             nb::handle rows) const {
    const bool is_text = !texts.is_none(), whole = !is_text && tensors_.holds<std::int64_t>(values);
    std::optional<RawIds> found = plan(feature, is_text ? ColumnType::kBytes
                                                : whole ? ColumnType::kInt64
                                                        : ColumnType::kFloat);
    const auto splits = tensors_.read<std::int64_t>(rows);
    if (!found || !splits) return std::nullopt;
    RawIds& one = *found;
    one.rows = *splits;
    if (is_text) {
      const auto bytes = tensors_.read<std::byte>(values);
      const auto each = tensors_.read<std::int64_t>(texts);
      if (!bytes || !each) return std::nullopt;
      one.texts = {*bytes, *each, *splits};
    } else if (whole) {
      const auto ints = tensors_.read<std::int64_t>(values);
      if (!ints) return std::nullopt;
      one.ints = *ints;
    } else {
      const auto floats = tensors_.read<float>(values);
      if (!floats) return std::nullopt;
      one.floats = *floats;
    }
    return found;
  }

  std::vector<Feature> features_;
  std::vector<List> lists_;
  TensorReader tensors_;
};

bool pack_floats(
    const std::vector<std::tuple<std::optional<Splits>, std::optional<Column<float>>, Splits>>& columns,
    std::size_t rows, const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& out) {
  std::vector<RawNumbers> raw;
  for (const auto& [ints, floats, splits] : columns)
    raw.push_back({span_of(ints), span_of(floats), as_span(splits)});
  GilReleased unlocked;
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
  nb::class_<IdPacker>(m, "IdPacker", "Packs the ids of many features of a batch in one call. Thread-safe.")
      .def(nb::init<std::vector<IdPacker::Feature>, std::vector<IdPacker::List>, nb::object, nb::object,
                    nb::object>(),
           "features"_a, "lists"_a, "uint8"_a, "int64"_a, "float32"_a,
           nb::sig("def __init__(self, features: Sequence[tuple[RawKind | None, RawKind | None, RawKind | "
                   "None, Sequence[float], Sequence[float], str | None, int | None]], lists: "
                   "Sequence[tuple[Sequence[tuple[RowColumnKind, tuple[RawKind | None, RawKind | None, "
                   "RawKind | None, Sequence[float], Sequence[float], str | None, int | None], tuple[int, "
                   "bool, int, int]]], int, bool, bool]], uint8: object, int64: object, float32: object) -> "
                   "None"),
           "Features are (kind of texts, of ints, of floats, boundaries of ints, of floats, separator, "
           "slot). Lists are features of several columns, or of which a row keeps some values: (columns, how "
           "many values are kept, 0 for all, whether the last ones, whether each step must have a value in "
           "each column), and a column is (kind, feature, how its times are read). The types are torch's.")
      .def("pack", &IdPacker::pack, "columns"_a,
           nb::sig("def pack(self, columns: list[tuple[object, object | None, object]]) -> "
                   "tuple[NDArray[numpy.int64], NDArray[numpy.int64]] | None"),
           "(ids, splits) of a column for each feature: tensors of (values, splits of texts, splits of "
           "rows). None if something cannot be read, or is no plain tensor on the CPU.")
      .def(
          "pack_rows", &IdPacker::pack_rows, "blocks"_a, "block_of"_a.noconvert().none(),
          "rows"_a.noconvert(), "ids"_a, "numbers"_a, "times"_a.none(), "lists"_a,
          nb::sig(
              "def pack_rows(self, blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | "
              "None, rows: NDArray[numpy.int64], ids: Sequence[int], numbers: Sequence[tuple[int, "
              "RowNumbers, int, bool, str | None]], times: tuple[int, int, bool, int, int] | None, lists: "
              "Sequence[Sequence[int]]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64] | bool | "
              "None, NDArray[numpy.float32], list[int], tuple[NDArray[numpy.int64], "
              "NDArray[numpy.int64] | None, int] | None, tuple[int, list[int], NDArray[numpy.float32] | "
              "None]]"),
          "(ids, splits, numbers, missing, times, lists) of rows of blocks, given the column of each "
          "feature; the "
          "column, kind and count per row of numbers, whether texts are read and their separator; and the "
          "column of times, per second (0: by size), ISO texts alone, the oldest and the latest second. "
          "Splits are True if every cell has one id, None if an id cannot be read. A row without numbers "
          "has NaN; `missing` is how many rows lack a number, -1 if some cannot be read. Times are "
          "(seconds, splits if a row has none, forms), None if one cannot be read. Given the columns of "
          "the first lists, lists are (how many were packed behind the ids, all before one that cannot be "
          "read; the forms of times in each of their columns; weights of all ids, None if no list has any).");
  nb::enum_<RowColumn::Kind>(m, "RowColumnKind", "What a column of a list holds.")
      .value("IDS", RowColumn::Kind::kIds)
      .value("WEIGHTS", RowColumn::Kind::kWeights)
      .value("SECONDS", RowColumn::Kind::kSeconds)
      .value("GAPS", RowColumn::Kind::kGaps);
  nb::enum_<RowNumbers>(m, "RowNumbers", "Which numbers a row may have, other than none.")
      .value("ANY", RowNumbers::kAny)
      .value("CLASSES", RowNumbers::kClasses);
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
