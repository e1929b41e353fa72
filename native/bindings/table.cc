// Python face of monolith::Table: checks shapes, releases the GIL, adds no behaviour.
#include "table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "chunks.h"
#include "digest.h"
#include "hash.h"
#include "table_snapshot.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
using Times = Column<std::uint32_t>;
using Floats = Matrix<float>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutFloats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

template <class Array>
void check_rows(const Array& array, std::size_t rows, std::size_t width) {
  check(array.shape(0) == rows && array.shape(1) == width, "rows must have shape (len(ids), width)");
}

// One time for all ids, or one for each.
EventTimes event_times(const Times& times, const Ids& ids) {
  if (times.size() == 1) return {times.data()[0]};
  check(times.size() == ids.size(), "event times must be one, or one per id");
  return {0, times.data()};
}

std::size_t lookup(const Table& table, const Ids& ids, const OutFloats& out) {
  check_rows(out, ids.size(), table.dim());
  GilReleased unlocked;
  return table.lookup(as_span(ids), out.data());
}

void lookup_rows(const Table& table, const Ids& ids, const Out<std::uint8_t>& found,
                 const Out<std::int64_t>& times, const OutFloats& values, const OutFloats& state) {
  check(found.size() == ids.size() && times.size() == ids.size(),
        "found and times must have one entry per id");
  check_rows(values, ids.size(), table.dim());
  check_rows(state, ids.size(), table.state_dim());
  GilReleased unlocked;
  table.lookup_rows(as_span(ids), found.data(), times.data(), values.data(), state.data());
}

void contains(const Table& table, const Ids& ids, const Out<std::uint8_t>& found) {
  check(found.size() == ids.size(), "found must have one entry per id");
  GilReleased unlocked;
  table.lookup_rows(as_span(ids), found.data(), nullptr, nullptr, nullptr);
}

void assign(Table& table, const Ids& ids, const Floats& values, const Times& times) {
  check_rows(values, ids.size(), table.dim());
  const EventTimes when = event_times(times, ids);
  GilReleased unlocked;
  table.assign(as_span(ids), values.data(), when);
}

void assign_add(Table& table, const Ids& ids, const Floats& values, const Times& times) {
  check_rows(values, ids.size(), table.dim());
  const EventTimes when = event_times(times, ids);
  GilReleased unlocked;
  table.assign_add(as_span(ids), values.data(), when);
}

void apply_gradients(Table& table, const Ids& ids, const Floats& gradients, const Column<float>& rates,
                     std::int64_t step, const Times& times, bool dedup, const std::optional<Floats>& latest,
                     const std::optional<Column<std::uint32_t>>& counts) {
  check_rows(gradients, ids.size(), table.dim());
  if (latest) check_rows(*latest, ids.size(), table.dim());
  check(!counts || counts->size() == ids.size(), "counts must have one entry per id");
  EventTimes when = event_times(times, ids);
  if (counts) when.counts = counts->data();
  GilReleased unlocked;
  table.apply_gradients(as_span(ids), gradients.data(), latest ? latest->data() : nullptr, as_span(rates),
                        step, when, dedup);
}

void reinitialize(Table& table, const Ids& ids, std::uint32_t now, const Out<std::int8_t>& status) {
  check(status.size() == ids.size(), "status must have one entry per id");
  GilReleased unlocked;
  table.reinitialize(as_span(ids), now, status.data());
}

void restore(Table& table, const Ids& ids, const Times& times, const Floats& values,
             const std::optional<Floats>& state, const std::optional<Column<std::uint8_t>>& fresh_state) {
  check(times.size() == ids.size(), "event times must be one per id");
  check_rows(values, ids.size(), table.dim());
  if (state) check_rows(*state, ids.size(), table.state_dim());
  check(!fresh_state || fresh_state->size() == ids.size(), "fresh_state must have one entry per id");
  GilReleased unlocked;
  table.restore(as_span(ids), times.data(), values.data(), state ? state->data() : nullptr,
                fresh_state ? fresh_state->data() : nullptr);
}

std::size_t remove(Table& table, const Ids& ids) {
  GilReleased unlocked;
  return table.remove(as_span(ids));
}

void digests(const Table& table, const Ids& buckets, std::uint64_t number, std::uint64_t total,
             const Out<std::uint64_t>& sums) {
  check(sums.size() == buckets.size(), "sums must have one entry per bucket");
  GilReleased unlocked;
  table.digests(as_span(buckets), number, total, sums.data());
}

void row_digests(const Ids& ids, const Floats& values, const Out<std::uint64_t>& digests) {
  check_rows(values, ids.size(), values.shape(1));
  check(digests.size() == ids.size(), "digests must have one entry per id");
  const std::size_t width = values.shape(1);
  GilReleased unlocked;
  for (std::size_t i = 0; i < ids.size(); ++i)
    digests.data()[i] = row_digest(ids.data()[i], {values.data() + i * width, width});
}

template <class Scanned, class... Options>
nb::tuple scan(const Scanned& scanned, std::uint64_t cursor, std::uint64_t last, std::size_t limit,
               Options... options) {
  Chunk chunk;
  {
    GilReleased unlocked;
    chunk = scanned.scan(cursor, last, limit, options...);
  }
  return columns_of(std::move(chunk), static_cast<std::size_t>(scanned.dim()),
                    static_cast<std::size_t>(scanned.state_dim()));
}

nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>> removed(const TableSnapshot& snapshot) {
  return owned(snapshot.removed());
}

}  // namespace

void bind_table(nb::module_& m) {
  nb::enum_<CompressorKind>(m, "CompressorKind")
      .value("FP32", CompressorKind::kFp32)
      .value("FP16", CompressorKind::kFp16)
      .value("FIXED_R8", CompressorKind::kFixedR8)
      .value("ONE_BIT", CompressorKind::kOneBit);

  nb::enum_<ValueCoding>(m, "ValueCoding")
      .value("FLOAT32", ValueCoding::kFloat32)
      .value("BFLOAT16", ValueCoding::kBfloat16)
      .value("FLOAT16", ValueCoding::kFloat16)
      .value("INT8", ValueCoding::kInt8);

  nb::class_<OptimizerSpec>(m, "OptimizerSpec",
                            "A sparse optimizer and its settings, by the names of the configs.")
      .def(
          "__init__",
          [](OptimizerSpec* self, const std::string& kind) {
            new (self) OptimizerSpec{};
            self->kind = optimizer_kind(kind);
          },
          "kind"_a)
      .def_rw("initial_accumulator_value", &OptimizerSpec::initial_accumulator_value)
      .def_rw("weight_decay", &OptimizerSpec::weight_decay)
      .def_rw("beta", &OptimizerSpec::beta)
      .def_rw("beta1", &OptimizerSpec::beta1)
      .def_rw("beta2", &OptimizerSpec::beta2)
      .def_rw("epsilon", &OptimizerSpec::epsilon)
      .def_rw("rho", &OptimizerSpec::rho)
      .def_rw("momentum", &OptimizerSpec::momentum)
      .def_rw("l1", &OptimizerSpec::l1)
      .def_rw("l2", &OptimizerSpec::l2)
      .def_rw("delay_compensation", &OptimizerSpec::lambda)
      .def_rw("use_nesterov", &OptimizerSpec::use_nesterov)
      .def_rw("decouple_weight_decay", &OptimizerSpec::decouple_weight_decay)
      .def_rw("lazy_decay", &OptimizerSpec::lazy_decay)
      .def_rw("decay_rate", &OptimizerSpec::decay_rate)
      .def_rw("delay_compensated", &OptimizerSpec::delay_compensated)
      .def_rw("stochastic_rounding", &OptimizerSpec::stochastic_rounding);

  nb::class_<CompressorSpec>(m, "CompressorSpec")
      .def(
          "__init__",
          [](CompressorSpec* self, CompressorKind kind) {
            new (self) CompressorSpec{};
            self->kind = kind;
          },
          "kind"_a)
      .def_rw("range", &CompressorSpec::range)
      .def_rw("step_size", &CompressorSpec::step_size)
      .def_rw("init_scale", &CompressorSpec::init_scale)
      .def_rw("max_scale", &CompressorSpec::max_scale)
      .def_rw("amplitude", &CompressorSpec::amplitude);

  nb::class_<SegmentSpec>(m, "SegmentSpec")
      .def(
          "__init__",
          [](SegmentSpec* self, int dim, const OptimizerSpec& optimizer, std::pair<float, float> initial,
             const CompressorSpec& compressor) {
            new (self) SegmentSpec{dim, optimizer, {initial.first, initial.second}, compressor};
          },
          "dim"_a, "optimizer"_a, "initial"_a, "compressor"_a);

  nb::class_<TableStats>(m, "TableStats")
      .def_ro("rows", &TableStats::rows)
      .def_ro("inserted", &TableStats::inserted)
      .def_ro("filtered", &TableStats::filtered)
      .def_ro("refused", &TableStats::refused)
      .def_ro("evicted", &TableStats::evicted)
      .def_ro("removed", &TableStats::removed)
      .def_ro("non_finite", &TableStats::non_finite)
      .def_ro("bytes_total", &TableStats::bytes_total)
      .def_ro("bytes_rows", &TableStats::bytes_rows)
      .def_ro("bytes_index", &TableStats::bytes_index)
      .def_ro("slots", &TableStats::slots)
      .def_ro("partitions", &TableStats::partitions)
      .def_ro("max_event_time", &TableStats::max_event_time);

  nb::class_<Table>(m, "Table", "Maps int64 ids to rows of floats. Thread-safe.")
      .def(
          "__init__",
          [](Table* self, std::vector<SegmentSpec> segments, bool serving, ValueCoding coding,
             bool round_by_chance, bool skip_zero, bool expire_when_full, std::uint64_t seed,
             std::uint64_t initial_rows, std::uint64_t capacity_bytes, std::int64_t expire_seconds,
             std::vector<std::pair<std::uint32_t, std::int64_t>> slot_expire_seconds,
             std::shared_ptr<Admission> admission, std::shared_ptr<TouchedKeySet> touched,
             std::shared_ptr<Workers> workers) {
            TableSpec spec;
            spec.segments = std::move(segments);
            spec.serving = serving;
            spec.storage = {coding, round_by_chance};
            spec.skip_zero = skip_zero;
            spec.expire_when_full = expire_when_full;
            spec.seed = seed;
            spec.initial_rows = initial_rows;
            spec.capacity_bytes = capacity_bytes;
            spec.expire_seconds = expire_seconds;
            spec.slot_expire_seconds = std::move(slot_expire_seconds);
            new (self) Table(std::move(spec), std::move(admission), std::move(touched), std::move(workers));
          },
          nb::kw_only(), "segments"_a, "serving"_a, "coding"_a, "round_by_chance"_a, "skip_zero"_a,
          "expire_when_full"_a, "seed"_a, "initial_rows"_a, "capacity_bytes"_a, "expire_seconds"_a,
          "slot_expire_seconds"_a, "admission"_a.none(), "touched"_a.none(), "workers"_a.none())
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("state_dim", &Table::state_dim)
      .def_prop_ro("row_bytes", &Table::row_bytes, "Bytes of one row as stored.")
      .def_prop_ro("refused", &Table::refused)
      .def_prop_ro("max_event_time", &Table::max_event_time)
      .def("__len__", &Table::size)
      .def("lookup", &lookup, "ids"_a.noconvert(), "out"_a.noconvert(),
           "Copy one embedding per id into `out`, zeros for an unseen id; returns how many were seen.")
      .def("lookup_rows", &lookup_rows, "ids"_a.noconvert(), "found"_a.noconvert(), "times"_a.noconvert(),
           "values"_a.noconvert(), "state"_a.noconvert(), "Copy whole rows into columns.")
      .def("contains", &contains, "ids"_a.noconvert(), "found"_a.noconvert())
      .def("assign", &assign, "ids"_a.noconvert(), "values"_a.noconvert(), "times"_a.noconvert())
      .def("assign_add", &assign_add, "ids"_a.noconvert(), "values"_a.noconvert(), "times"_a.noconvert())
      .def("apply_gradients", &apply_gradients, "ids"_a.noconvert(), "gradients"_a.noconvert(),
           "rates"_a.noconvert(), "step"_a, "times"_a.noconvert(), "dedup"_a, "latest"_a.noconvert().none(),
           "counts"_a.noconvert().none())
      .def("reinitialize", &reinitialize, "ids"_a.noconvert(), "now"_a, "status"_a.noconvert())
      .def("restore", &restore, "ids"_a.noconvert(), "times"_a.noconvert(), "values"_a.noconvert(),
           "state"_a.noconvert().none(), "fresh_state"_a.noconvert().none())
      .def("remove", &remove, "ids"_a.noconvert())
      .def("evict", &Table::evict, "now"_a, nb::call_guard<GilReleased>())
      .def("count_expired", &Table::count_expired, "now"_a, nb::call_guard<GilReleased>())
      .def("clear", &Table::clear, "rows"_a = 0, nb::call_guard<GilReleased>(),
           "Drop all rows; with room for `rows` new ones, which need not then grow it step by step.")
      .def("scan", &scan<Table>, "cursor"_a, "last"_a, "limit"_a,
           nb::sig("def scan(self, cursor: int, last: int, limit: int) -> tuple[NDArray[numpy.int64], "
                   "NDArray[numpy.int64], NDArray[numpy.float32], NDArray[numpy.float32], int | None]"),
           "(ids, times, values, state, cursor or None): rows with hashes from `cursor` to `last`, in their "
           "order.")
      .def("track_changes", &Table::track_changes, "on"_a, nb::call_guard<GilReleased>(),
           "Track from now on which rows change and which are removed, for snapshots to list; or stop.")
      .def("touch", &Table::touch, "set"_a, nb::call_guard<GilReleased>(),
           "Tell `set` from now on which ids get another row or lose theirs.")
      .def("untouch", &Table::untouch, "set"_a, nb::call_guard<GilReleased>())
      .def("digests", &digests, "buckets"_a.noconvert(), "number"_a, "total"_a, "sums"_a.noconvert(),
           "Fill `sums` with the sum of the digests of each bucket's rows that are `number` modulo `total`.")
      .def("freeze", &Table::freeze, nb::call_guard<GilReleased>())
      .def("thaw", &Table::thaw)
      .def_prop_rw("scales", &Table::scales, &Table::set_scales)
      .def("stats", &Table::stats, nb::call_guard<GilReleased>());

  m.def("row_digests", &row_digests, "ids"_a.noconvert(), "values"_a.noconvert(), "digests"_a.noconvert(),
        "Fill `digests` with one for each id and its values.");

  nb::class_<TableSnapshot>(m, "TableSnapshot", "A table as it was at one moment, while training continues.")
      .def(nb::init<Table&>(), "table"_a, nb::keep_alive<1, 2>(), nb::call_guard<GilReleased>())
      .def_prop_ro("rows", &TableSnapshot::rows)
      .def_prop_ro("max_event_time", &TableSnapshot::max_event_time)
      .def_prop_ro("scales", &TableSnapshot::scales)
      .def_prop_ro("captured_bytes", &TableSnapshot::captured_bytes,
                   "Bytes of rows copied because they changed.")
      .def_prop_ro("tracked", &TableSnapshot::tracked,
                   "Whether it lists the changes since the previous snapshot.")
      .def_prop_ro("cleared", &TableSnapshot::cleared)
      .def("removed", &removed,
           "Ids removed since the previous snapshot, as int64; some may have a row again.")
      .def("scan", &scan<TableSnapshot, bool>, "cursor"_a, "last"_a, "limit"_a, "changed_only"_a,
           nb::sig("def scan(self, cursor: int, last: int, limit: int, changed_only: bool) -> "
                   "tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.float32], "
                   "NDArray[numpy.float32], int | None]"),
           "As Table.scan; with `changed_only`, only rows that changed since the previous snapshot.")
      .def("close", &TableSnapshot::close, "saved"_a, nb::call_guard<GilReleased>(),
           "Free the copies; if not `saved`, the next snapshot lists the same changes again.");
}

}  // namespace monolith
