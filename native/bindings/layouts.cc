// Python face of monolith::Layouts: releases the GIL, adds no behaviour.
#include "layouts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>

#include "arrays.h"
#include "bindings.h"
#include "frozen_table.h"
#include "infer_request.h"
#include "overlaid_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
using Floats = Column<float>;
using OutIds = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using AnyOutFloats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

// A view of what a batch owns, which keeps the batch alive. Not const, because torch takes no other; no code
// writes.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> view(nb::handle batch, std::span<const T> column) {
  return {const_cast<T*>(column.data()), {column.size()}, batch};
}

std::unique_ptr<LayoutBatch> plan(const Layouts& layouts, const Ids& ids, const Ids& splits,
                                  const Column<std::uint8_t>& shared, const Ids& where,
                                  std::size_t batch_size, const std::optional<Floats>& weights) {
  GilReleased unlocked;
  return layouts.plan(as_span(ids), as_span(splits), as_span(shared), as_span(where), batch_size,
                      weights ? as_span(*weights) : std::span<const float>());
}

void gather(const Layouts& layouts, const LayoutBatch& batch, const Floats& rows,
            const std::vector<AnyOutFloats>& outputs) {
  std::vector<std::span<float>> to;
  to.reserve(outputs.size());
  for (const auto& output : outputs) to.push_back(as_span(output));
  GilReleased unlocked;
  layouts.gather(batch, as_span(rows), to);
}

// From the ids of a batch to the outputs, over the rows of a group of tables. Without the GIL.
template <class Group>
void fill(const Layouts& layouts, const Group& group, const LayoutBatch& batch,
          std::span<const std::span<float>> outputs) {
  const std::unique_ptr<float[]> rows(new float[batch.floats()]);
  const std::span<float> found(rows.get(), batch.floats());
  group.lookup(batch.ids(), batch.sizes(), 1, found);
  layouts.gather(batch, found, outputs);
}

template <class Group>
void read_rows(const Layouts& layouts, const Group& group, const Ids& ids, const Ids& splits,
               const Column<std::uint8_t>& shared, const Ids& where, std::size_t batch_size,
               const std::vector<AnyOutFloats>& outputs) {
  std::vector<std::span<float>> to;
  to.reserve(outputs.size());
  for (const auto& output : outputs) to.push_back(as_span(output));
  GilReleased unlocked;
  fill(layouts, group,
       *layouts.plan(as_span(ids), as_span(splits), as_span(shared), as_span(where), batch_size), to);
}

template <class Group>
void read_packed(const Layouts& layouts, const Group& group, const PackedRows& packed, const Ids& where,
                 const std::vector<AnyOutFloats>& outputs) {
  std::vector<std::span<float>> to;
  to.reserve(outputs.size());
  for (const auto& output : outputs) to.push_back(as_span(output));
  GilReleased unlocked;
  const std::vector<std::uint8_t> none_shared(packed.id_features);
  fill(layouts, group, *layouts.plan(packed.ids, packed.splits, none_shared, as_span(where), packed.rows),
       to);
}

void scatter(const Layouts& layouts, const LayoutBatch& batch, const std::optional<Floats>& rows,
             const std::vector<std::optional<AnyFloats>>& gradients, float scale, const OutFloats& out) {
  std::vector<std::span<const float>> from;
  from.reserve(gradients.size());
  for (const auto& gradient : gradients)
    from.push_back(gradient ? as_span(*gradient) : std::span<const float>());
  GilReleased unlocked;
  layouts.scatter(batch, rows ? as_span(*rows) : std::span<const float>(), from, scale, as_span(out));
}

void number(const Layouts& layouts, const LayoutBatch& batch, const OutIds& out) {
  nb::gil_scoped_release unlocked;
  layouts.number(batch, as_span(out));
}

void newest(const Layouts& layouts, const LayoutBatch& batch, const Ids& times, const OutIds& out) {
  GilReleased unlocked;
  layouts.newest(batch, as_span(times), as_span(out));
}

nb::tuple moves(const Layouts& layouts, const LayoutBatch& batch, const std::vector<int>& uses) {
  Layouts::Moves found;
  {
    GilReleased unlocked;
    found = layouts.moves(batch, uses);
  }
  return nb::make_tuple(owned(std::move(found.from)), owned(std::move(found.to)),
                        owned(std::move(found.scale)));
}

Layouts* make(std::vector<int> table_dims, const std::vector<std::tuple<int, Pooling, int>>& features,
              const std::vector<std::tuple<int, int, int, int, std::int64_t, std::int64_t, bool>>& uses,
              std::vector<std::int64_t> output_floats, std::shared_ptr<Workers> workers) {
  std::vector<FeatureSpec> feature_specs;
  for (const auto& [table, pooling, length] : features) feature_specs.push_back({table, pooling, length});
  std::vector<UseSpec> use_specs;
  for (const auto& [feature, start, width, output, offset, stride, adds] : uses)
    use_specs.push_back({feature, start, width, output, offset, stride, adds});
  return new Layouts(std::move(table_dims), std::move(feature_specs), std::move(use_specs),
                     std::move(output_floats), std::move(workers));
}

}  // namespace

void bind_layouts(nb::module_& m) {
  nb::enum_<Pooling>(m, "Pooling", "How the rows of one cell become one.")
      .value("SUM", Pooling::kSum)
      .value("MEAN", Pooling::kMean)
      .value("MAX", Pooling::kMax)
      .value("FIRST_N", Pooling::kFirstN)
      .value("EACH", Pooling::kEach);

  nb::class_<LayoutBatch>(m, "LayoutBatch", "One batch, planned. Never changes.")
      .def_prop_ro(
          "ids", [](nb::handle self) { return view(self, nb::cast<const LayoutBatch&>(self).ids()); },
          nb::sig("def ids(self) -> NDArray[numpy.int64]"), "Distinct ids, table after table.")
      .def_prop_ro(
          "sizes", [](nb::handle self) { return view(self, nb::cast<const LayoutBatch&>(self).sizes()); },
          nb::sig("def sizes(self) -> NDArray[numpy.int64]"), "How many distinct ids each table has.")
      .def_prop_ro(
          "counts", [](nb::handle self) { return view(self, nb::cast<const LayoutBatch&>(self).counts()); },
          nb::sig("def counts(self) -> NDArray[numpy.int64]"), "How often each distinct id was met.")
      .def_prop_ro("batch_size", &LayoutBatch::batch_size)
      .def_prop_ro("floats", &LayoutBatch::floats, "Of the distinct ids' rows, one after another.")
      .def_prop_ro("one_each", &LayoutBatch::one_each, "Whether every cell that is read has exactly one id.");

  nb::class_<Layouts>(m, "Layouts", "From looked-up rows to a model's inputs, and back. Thread-safe.")
      .def(nb::new_(&make), "table_dims"_a, "features"_a, "uses"_a, "output_floats"_a, "workers"_a.none(),
           "features: (table, pooling, length); uses: (feature, start, width, output, offset, stride, adds).")
      .def("plan", &plan, "ids"_a.noconvert(), "splits"_a.noconvert(), "shared"_a.noconvert(),
           "where"_a.noconvert(), "batch_size"_a, "weights"_a.noconvert().none() = nb::none(),
           "Find the distinct ids of each table.")
      .def("gather", &gather, "batch"_a, "rows"_a.noconvert(), "outputs"_a.noconvert(),
           "Fill the outputs from one row per distinct id.")
      .def("read_rows", &read_rows<FrozenGroup>, "group"_a, "ids"_a.noconvert(), "splits"_a.noconvert(),
           "shared"_a.noconvert(), "where"_a.noconvert(), "batch_size"_a, "outputs"_a.noconvert(),
           "Find the distinct ids of a batch and their rows in a group, and fill the outputs with them.")
      .def("read_rows", &read_rows<OverlaidGroup>, "group"_a, "ids"_a.noconvert(), "splits"_a.noconvert(),
           "shared"_a.noconvert(), "where"_a.noconvert(), "batch_size"_a, "outputs"_a.noconvert())
      .def("read_packed", &read_packed<FrozenGroup>, "group"_a, "packed"_a, "where"_a.noconvert(),
           "outputs"_a.noconvert(), "The same for the features of requests that a plan has packed.")
      .def("read_packed", &read_packed<OverlaidGroup>, "group"_a, "packed"_a, "where"_a.noconvert(),
           "outputs"_a.noconvert())
      .def("scatter", &scatter, "batch"_a, "rows"_a.noconvert().none(), "gradients"_a.noconvert(), "scale"_a,
           "out"_a.noconvert(), "Fill `out` with the gradient of each distinct id's row.")
      .def("number", &number, "batch"_a, "out"_a.noconvert(),
           "Fill `out`, table after table, with the number of each id that is read among the distinct ones.")
      .def("newest", &newest, "batch"_a, "times"_a.noconvert(), "out"_a.noconvert(),
           "Fill `out`, for each distinct id, with the newest time of the examples that contain it.")
      .def("moves", &moves, "batch"_a, "uses"_a,
           nb::sig("def moves(self, batch: LayoutBatch, uses: Sequence[int]) -> tuple[NDArray[numpy.int64], "
                   "NDArray[numpy.int64], NDArray[numpy.float32]]"),
           "(from, to, scale): the moves that gathering by these uses makes, for another device to make.");
}

}  // namespace monolith
