// Python face of monolith::TableGroup: releases the GIL, adds no behaviour.
#include "table_group.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "kept_arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
using Floats = Column<float>;
using OutFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<nb::numpy, float, nb::ndim<1>>;

nb::tuple offsets(const Ids& dims, const Ids& sizes, std::size_t num_shards, std::size_t num_ids) {
  FusedOffsets found = fused_offsets(as_span(dims), as_span(sizes), num_shards, num_ids);
  return nb::make_tuple(owned(std::move(found.recv_splits)), owned(std::move(found.ids)),
                        owned(std::move(found.floats)));
}

void lookup(const TableGroup& group, const Ids& ids, const Ids& sizes, std::size_t num_shards,
            const OutFloats& out) {
  GilReleased unlocked;
  group.lookup(as_span(ids), as_span(sizes), num_shards, as_span(out));
}

FloatArray read(const TableGroup& group, const Ids& ids, const Ids& sizes, std::size_t num_shards,
                KeptMemory& memory) {
  std::unique_ptr<KeptArray<float>> rows;
  {
    GilReleased unlocked;
    const std::size_t size = group.num_floats(as_span(sizes), num_shards, ids.size());
    rows = std::make_unique<KeptArray<float>>(memory, size);
    group.lookup(as_span(ids), as_span(sizes), num_shards, {rows->data(), size});
  }
  return owned(std::move(rows));
}

void apply_gradients(const TableGroup& group, const Ids& ids, const Ids& sizes, std::size_t num_shards,
                     const Floats& gradients, const Floats& rates, std::int64_t step,
                     const Column<std::uint32_t>& times, bool dedup, const std::optional<Floats>& latest,
                     const std::optional<Column<std::uint32_t>>& counts) {
  const std::span<const float> seen = latest ? as_span(*latest) : std::span<const float>();
  const auto often = counts ? as_span(*counts) : std::span<const std::uint32_t>();
  GilReleased unlocked;
  group.apply_gradients(as_span(ids), as_span(sizes), num_shards,
                        {as_span(gradients), seen, as_span(rates), step, as_span(times), dedup, often});
}

using OutInts = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

FoundRows find(const TableGroup& group, const Ids& ids, const Ids& sizes) {
  GilReleased unlocked;
  return group.find(as_span(ids), as_span(sizes));
}

void take(const TableGroup& group, const FoundRows& found, const OutInts& ids, const OutInts& times,
          const OutFloats& values, const OutFloats& state) {
  GilReleased unlocked;
  group.take(found, {as_span(ids), as_span(times), as_span(values), as_span(state)});
}

using Incoming = std::tuple<Ids, Ids, Column<std::uint8_t>, Floats, Floats>;

std::vector<std::size_t> put(const TableGroup& group, const std::vector<Incoming>& rows) {
  GilReleased unlocked;
  std::vector<IncomingRows> columns;
  columns.reserve(rows.size());
  for (const auto& [hashes, times, there, values, state] : rows)
    columns.push_back({as_span(hashes), as_span(times), as_span(there), as_span(values), as_span(state)});
  return group.put(columns);
}

std::vector<std::size_t> rows_by_table(const FoundRows& found) {
  std::vector<std::size_t> counts;
  counts.reserve(found.ids.size());
  for (const auto& ids : found.ids) counts.push_back(ids.size());
  return counts;
}

}  // namespace

void bind_table_group(nb::module_& m) {
  m.def("fused_offsets", &offsets, "dims"_a.noconvert(), "sizes"_a.noconvert(), "num_shards"_a, "num_ids"_a,
        nb::sig("def fused_offsets(dims: NDArray[numpy.int64], sizes: NDArray[numpy.int64], num_shards: int, "
                "num_ids: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]"),
        "(recv_splits, id_offsets, float_offsets) of a fused call over tables of these dims.");

  nb::class_<FoundRows>(m, "FoundRows", "The rows that a batch finds in the tables of a group.")
      .def_prop_ro("rows", &rows_by_table, "By table: distinct ids that have a row.")
      .def_ro("distinct", &FoundRows::distinct, "By table: distinct ids, with a row or without.")
      .def_ro("sightings", &FoundRows::sightings, "By table: positions of the batch whose id has a row.");

  nb::class_<TableGroup>(m, "TableGroup", "One call for many tables. Thread-safe.")
      .def(nb::init<std::vector<std::shared_ptr<Table>>, std::shared_ptr<Workers>>(), "tables"_a,
           "workers"_a.none() = nb::none(), "Keeps the tables alive.")
      .def("lookup", &lookup, "ids"_a.noconvert(), "sizes"_a.noconvert(), "num_shards"_a, "out"_a.noconvert(),
           "Copy one embedding per id into `out`; sizes[shard * tables + table] says whose ids are whose.")
      .def("read", &read, "ids"_a.noconvert(), "sizes"_a.noconvert(), "num_shards"_a, "memory"_a,
           nb::sig("def read(self, ids: NDArray[numpy.int64], sizes: NDArray[numpy.int64], num_shards: int, "
                   "memory: KeptMemory) -> NDArray[numpy.float32]"),
           "Like lookup, into an array of `memory`.")
      .def("find", &find, "ids"_a.noconvert(), "sizes"_a.noconvert(),
           "Find which ids of one batch, table after table, have a row.")
      .def("take", &take, "found"_a, "ids"_a.noconvert(), "times"_a.noconvert(), "values"_a.noconvert(),
           "state"_a.noconvert(), "Move found rows out of the tables into these columns, table after table.")
      .def("put", &put, "rows"_a.noconvert(),
           nb::sig("def put(self, rows: Sequence[tuple[NDArray[numpy.int64], NDArray[numpy.int64], "
                   "NDArray[numpy.uint8], NDArray[numpy.float32], NDArray[numpy.float32]]]) -> list[int]"),
           "Restore rows, table after table: hashes, times, whether there is a row, values and state. Return "
           "how many each table was given.")
      .def("apply_gradients", &apply_gradients, "ids"_a.noconvert(), "sizes"_a.noconvert(), "num_shards"_a,
           "gradients"_a.noconvert(), "rates"_a.noconvert(), "step"_a, "times"_a.noconvert(), "dedup"_a,
           "latest"_a.noconvert().none(), "counts"_a.noconvert().none() = nb::none(),
           "Step every table once, with its ids of all shards in shard order.");
}

}  // namespace monolith
