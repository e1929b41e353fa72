// Python face of choosing rows: checks shapes and places, releases the GIL, adds no behaviour.
#include "row_choice.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "column_block.h"
#include "hash.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using BlockOf = std::optional<Column<std::int32_t>>;
using HashedColumns = std::vector<std::pair<std::size_t, bool>>;

std::vector<std::uint64_t> hashes(const RowPlaces& places, const HashedColumns& columns, std::uint64_t seed) {
  std::vector<std::uint64_t> totals(places.rows().size(), mix(seed));
  places.check();
  for (const auto& [number, times] : columns) {
    const auto column = places.column(number);
    hash_column(Places(column, places.which(), places.rows()), times, totals);
  }
  return totals;
}

auto hash_rows(const nb::tuple& blocks, const BlockOf& block_of, const Column<std::int64_t>& rows,
               const HashedColumns& columns, std::uint64_t seed) {
  const RowPlaces places(blocks, block_of, rows);
  std::vector<std::uint64_t> totals;
  {
    GilReleased unlocked;
    totals = hashes(places, columns, seed);
  }
  return owned(std::move(totals));
}

auto drawn_rows(const nb::tuple& blocks, const BlockOf& block_of, const Column<std::int64_t>& rows,
                const HashedColumns& columns, std::uint64_t seed, double low, double high) {
  const RowPlaces places(blocks, block_of, rows);
  std::vector<std::uint8_t> found(rows.size());
  {
    GilReleased unlocked;
    const std::vector<std::uint64_t> totals = hashes(places, columns, seed);
    for (std::size_t i = 0; i < totals.size(); ++i) found[i] = is_between(totals[i], low, high);
  }
  return owned(std::move(found));
}

auto marked_rows(const nb::tuple& blocks, const BlockOf& block_of, const Column<std::int64_t>& rows,
                 nb::handle key) {
  using Found = decltype(owned(std::vector<std::uint8_t>()));
  const RowPlaces places(blocks, block_of, rows);
  std::vector<const std::uint8_t*> marks;
  for (const ColumnBlock* const block : places.blocks()) {
    const std::vector<std::uint8_t>* const its = block->marks(key);
    if (its == nullptr) return std::optional<Found>();
    marks.push_back(its->data());
  }
  std::vector<std::uint8_t> found(rows.size());
  {
    GilReleased unlocked;
    places.check();
    const auto which = places.which();
    for (std::size_t i = 0; i < found.size(); ++i)
      found[i] = marks[which.empty() ? 0 : static_cast<std::size_t>(which[i])][places.rows()[i]];
  }
  return std::optional<Found>(owned(std::move(found)));
}

constexpr std::array<std::pair<const char*, RowTest::How>, 8> kHow = {{{"one of", RowTest::How::kOneOf},
                                                                       {"gt", RowTest::How::kAbove},
                                                                       {"ge", RowTest::How::kFrom},
                                                                       {"lt", RowTest::How::kBelow},
                                                                       {"le", RowTest::How::kUpTo},
                                                                       {"between", RowTest::How::kBetween},
                                                                       {"startswith", RowTest::How::kBegins},
                                                                       {"endswith", RowTest::How::kEnds}}};

RowTest::How how_of(const std::string& name) {
  for (const auto& [known, how] : kHow)
    if (name == known) return how;
  throw std::invalid_argument("row test: no such test");
}

// (how, ints, decimals, texts, wishes, shift, bits, any, none, all)
using TestState = std::tuple<int, std::vector<std::int64_t>, std::vector<double>, std::vector<nb::bytes>,
                             std::vector<Wishes>, int, std::uint64_t, Wishes, Wishes, Wishes>;

void new_test(RowChoice* to, const std::string& how, std::vector<std::int64_t> ints,
              std::vector<double> decimals, const std::vector<nb::bytes>& texts, std::vector<Wishes> wishes,
              int shift, std::uint64_t bits, Wishes any, Wishes none, Wishes all) {
  RowTest test{
      how_of(how), std::move(ints), std::move(decimals), {}, std::move(wishes), shift, bits, any, none, all};
  for (const nb::bytes& text : texts) test.texts.emplace_back(text.c_str(), text.size());
  new (to) RowChoice(std::move(test));
}

TestState state_of(const RowChoice& choice) {
  const RowTest& test = choice.test();
  std::vector<nb::bytes> texts;
  for (const std::string& text : test.texts) texts.emplace_back(text.data(), text.size());
  return {static_cast<int>(test.how),
          test.ints,
          test.decimals,
          texts,
          test.wishes,
          test.shift,
          test.bits,
          test.any,
          test.none,
          test.all};
}

void set_state(RowChoice& to, const TestState& state) {
  const auto& [how, ints, decimals, texts, wishes, shift, bits, any, none, all] = state;
  new_test(&to, kHow.at(static_cast<std::size_t>(how)).first, ints, decimals, texts, wishes, shift, bits, any,
           none, all);
}

// Rows whose columns are in some blocks, and which of the columns: (blocks, block of each row, rows,
// columns).
struct View {
  RowPlaces places;
  std::vector<std::size_t> columns;
};

std::vector<View> read_views(const nb::list& given, std::size_t size) {
  std::vector<View> views;
  for (const nb::handle one : given) {
    const auto view = nb::cast<nb::tuple>(one);
    if (view.size() != 4) throw std::invalid_argument("rows: a view is (blocks, block_of, rows, columns)");
    const auto rows = nb::cast<Column<std::int64_t>>(view[2], /*convert=*/false);
    if (rows.size() != size) throw std::invalid_argument("rows: a view has another number of rows");
    views.push_back({RowPlaces(nb::cast<nb::tuple>(view[0]), nb::cast<BlockOf>(view[1], false), rows),
                     nb::cast<std::vector<std::size_t>>(view[3])});
  }
  return views;
}

template <class Each>
void for_each_column(const std::vector<View>& views, Each&& each) {
  for (const View& view : views) {
    view.places.check();
    for (const std::size_t number : view.columns) {
      const auto column = view.places.column(number);
      each(Places(column, view.places.which(), view.places.rows()));
    }
  }
}

auto passing_rows(const RowChoice& choice, const nb::list& given, std::size_t size, std::optional<bool> empty,
                  bool single) {
  constexpr std::uint8_t kSeveral = 2;
  const std::vector<View> views = read_views(given, size);
  std::vector<std::uint8_t> passing(size);
  {
    GilReleased unlocked;
    std::vector<Wishes> found(size);
    for_each_column(views, [&](const Places& places) { choice.ask(places, found); });
    for (std::size_t i = 0; i < size; ++i) passing[i] = choice.passes(found[i]);
    if (empty || single) {
      std::vector<std::size_t> counts(size);
      for_each_column(views, [&](const Places& places) {
        const bool one_each = places.one_each();
        for (std::size_t i = 0; i < size; ++i) {
          const auto [begin, end] = one_each ? Places::Range{0, 1} : places.values(i);
          counts[i] += static_cast<std::size_t>(end - begin);
        }
      });
      for (std::size_t i = 0; i < size; ++i) {
        if (counts[i] == 0 && empty) passing[i] = *empty;
        if (counts[i] > 1 && single) passing[i] = kSeveral;
      }
    }
  }
  return owned(std::move(passing));
}

auto rows_that_reach(const nb::list& given, const Column<float>& thresholds) {
  const auto first = nb::cast<nb::tuple>(given[0]);
  const std::vector<View> views = read_views(given, nb::cast<Column<std::int64_t>>(first[2], false).size());
  std::vector<std::uint8_t> found;
  {
    GilReleased unlocked;
    for_each_column(views, [&](const Places& places) { found = reaches(places, as_span(thresholds)); });
  }
  return owned(std::move(found));
}

}  // namespace

void bind_row_choice(nb::module_& m) {
  m.def("hash_rows", &hash_rows, "blocks"_a, "block_of"_a.noconvert().none(), "rows"_a.noconvert(),
        "columns"_a, "seed"_a,
        nb::sig("def hash_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, "
                "rows: NDArray[numpy.int64], columns: Sequence[tuple[int, bool]], seed: int) -> "
                "NDArray[numpy.uint64]"),
        "A hash of what each of these rows has in some columns, given as (number, whether it holds times).");
  m.def("drawn_rows", &drawn_rows, "blocks"_a, "block_of"_a.noconvert().none(), "rows"_a.noconvert(),
        "columns"_a, "seed"_a, "low"_a, "high"_a,
        nb::sig("def drawn_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, "
                "rows: NDArray[numpy.int64], columns: Sequence[tuple[int, bool]], seed: int, low: float, "
                "high: float) -> NDArray[numpy.uint8]"),
        "Whether the hash of each row, as a number from 0 to below 1, is in [low, high).");
  m.def("marked_rows", &marked_rows, "blocks"_a, "block_of"_a.noconvert().none(), "rows"_a.noconvert(),
        "key"_a,
        nb::sig("def marked_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, "
                "rows: NDArray[numpy.int64], key: object) -> NDArray[numpy.uint8] | None"),
        "The mark that each row got under this key; None if a block has none.");
  nb::class_<RowChoice>(m, "RowTest", "What a filter asks of the values of a row. Immutable, thread-safe.")
      .def("__init__", &new_test, "how"_a, nb::kw_only(), "ints"_a = nb::list(), "decimals"_a = nb::list(),
           "texts"_a = nb::list(), "wishes"_a = nb::list(), "shift"_a = 0, "bits"_a = ~std::uint64_t{0},
           "any"_a = 0, "none"_a = 0, "all"_a = 0,
           nb::sig("def __init__(self, how: str, *, ints: Sequence[int] = (), decimals: Sequence[float] = (),"
                   " texts: Sequence[bytes] = (), wishes: Sequence[int] = (), shift: int = 0, "
                   "bits: int = 18446744073709551615, any: int = 0, none: int = 0, all: int = 0) -> None"),
           "Operands are of one type. Of `one of` each has `wishes`, a bit for each wish that a value which "
           "equals it fulfils; a value that passes gt, ge, lt, le, between, startswith or endswith fulfils "
           "the "
           "first. A row passes if its values together fulfil one of `any`, none of `none` and all of `all`.")
      .def("__getstate__", &state_of)
      .def("__setstate__", &set_state)
      .def("passing", &passing_rows, "views"_a, "size"_a, nb::kw_only(), "empty"_a.none() = nb::none(),
           "single"_a = false,
           nb::sig("def passing(self, views: list[tuple[tuple[ColumnBlock, ...], NDArray[numpy.int32] | None,"
                   " NDArray[numpy.int64], Sequence[int]]], size: int, *, empty: bool | None = None, "
                   "single: bool = False) -> NDArray[numpy.uint8]"),
           "Whether each row passes: 0 or 1, `empty` for one without a value, and 2 for one with several if "
           "it must be a `single` one. A view is (blocks, block of each row, rows, numbers of columns).");
  m.def("rows_that_reach", &rows_that_reach, "views"_a, "thresholds"_a.noconvert(),
        nb::sig("def rows_that_reach(views: list[tuple[tuple[ColumnBlock, ...], NDArray[numpy.int32] | None, "
                "NDArray[numpy.int64], Sequence[int]]], thresholds: NDArray[numpy.float32]) -> "
                "NDArray[numpy.uint8]"),
        "Whether a row has as many numbers as there are thresholds, and one reaches that of its place.");
  nb::class_<WishesOf<std::int64_t>>(m, "MarkedIds", "Ids with a mark each. Immutable, thread-safe.")
      .def(
          "__init__",
          [](WishesOf<std::int64_t>* to, const Column<std::int64_t>& ids,
             const Column<std::uint64_t>& marks) {
            GilReleased unlocked;
            new (to) WishesOf<std::int64_t>(as_span(ids), as_span(marks));
          },
          "ids"_a.noconvert(), "marks"_a.noconvert(),
          nb::sig("def __init__(self, ids: NDArray[numpy.int64], marks: NDArray[numpy.uint64]) -> None"),
          "An id that comes again has the bits of all its marks.")
      .def(
          "find",
          [](const WishesOf<std::int64_t>& self, const Column<std::int64_t>& ids) {
            std::vector<Wishes> found(ids.size());
            {
              GilReleased unlocked;
              for (std::size_t i = 0; i < found.size(); ++i) found[i] = self.find(ids.data()[i]);
            }
            return owned(std::move(found));
          },
          "ids"_a.noconvert(), nb::sig("def find(self, ids: NDArray[numpy.int64]) -> NDArray[numpy.uint64]"),
          "The mark of each id, 0 for one that has none.");
}

}  // namespace monolith
