// Python face of monolith::FrozenTable, FrozenGroup, OverlaidGroup and FrozenWriter: checks shapes, releases
// the GIL.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <system_error>

#include "arrays.h"
#include "bindings.h"
#include "frozen_table.h"
#include "frozen_writer.h"
#include "mapped_file.h"
#include "overlaid_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
using OutFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Segments = std::vector<std::pair<std::uint32_t, FrozenCoding>>;

void make(FrozenTable* self, int descriptor, std::string path) {
  try {
    auto file = std::make_shared<MappedFile>(descriptor);
    new (self) FrozenTable(file->bytes(), file, std::move(path));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

void bound_memory(FrozenTable& self, int descriptor, std::size_t row_bytes,
                  std::shared_ptr<BlockReader> reader) {
  try {
    GilReleased unlocked;
    self.bound_memory(descriptor, row_bytes, std::move(reader));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

Segments segments(const FrozenTable& self) {
  Segments found;
  for (const FrozenSegment& segment : self.segments()) found.emplace_back(segment.dim, segment.coding);
  return found;
}

void lookup(const FrozenTable& self, const Ids& ids, const OutRows& out) {
  if (out.shape(0) != ids.shape(0) || out.shape(1) != self.dim())
    throw nb::value_error("lookup: `out` must have shape (len(ids), dim)");
  GilReleased unlocked;
  self.lookup(as_span(ids), out.data());
}

void lookup_group(const FrozenGroup& self, const Ids& ids, const Ids& sizes, std::size_t num_batches,
                  const OutFloats& out) {
  GilReleased unlocked;
  self.lookup(as_span(ids), as_span(sizes), num_batches, as_span(out));
}

void lookup_overlaid(const OverlaidGroup& self, const Ids& ids, const Ids& sizes, std::size_t num_batches,
                     const OutFloats& out) {
  GilReleased unlocked;
  self.lookup(as_span(ids), as_span(sizes), num_batches, as_span(out));
}

void contains(const FrozenTable& self, const Ids& ids, const OutBytes& found) {
  if (found.size() != ids.size()) throw nb::value_error("contains: `found` must have one entry per id");
  GilReleased unlocked;
  self.contains(as_span(ids), found.data());
}

void matches(const FrozenTable& self, const Ids& ids, const Matrix<float>& values, const OutBytes& same) {
  if (same.size() != ids.size() || values.shape(0) != ids.size() || values.shape(1) != self.dim())
    throw nb::value_error("matches: `values` must have shape (len(ids), dim), `same` one entry per id");
  GilReleased unlocked;
  self.matches(as_span(ids), values.data(), same.data());
}

nb::tuple scan(const FrozenTable& self, std::uint64_t first, std::uint64_t last) {
  FrozenTable::Scanned found;
  {
    GilReleased unlocked;
    found = self.scan(first, last);
  }
  return nb::make_tuple(owned(std::move(found.ids)), owned(std::move(found.values)));
}

void make_writer(FrozenWriter* self, const Segments& segments, std::string name, std::uint64_t max_rows) {
  std::vector<FrozenSegment> all;
  for (const auto& [dim, coding] : segments) all.push_back({dim, coding});
  new (self) FrozenWriter(std::move(all), std::move(name), max_rows);
}

nb::bytes begin(FrozenWriter& self) {
  const FrozenHead head = self.begin();
  return nb::bytes(reinterpret_cast<const char*>(&head), sizeof head);
}

void add(FrozenWriter& self, const Ids& ids, const Matrix<float>& values, const OutBytes& out) {
  GilReleased unlocked;
  self.add(as_span(ids), as_span(values), std::as_writable_bytes(as_span(out)));
}

auto finish(FrozenWriter& self) {
  std::vector<std::byte> tail;
  {
    GilReleased unlocked;
    tail = self.finish();
  }
  auto held = std::make_unique<std::vector<std::byte>>(std::move(tail));
  auto* const data = reinterpret_cast<std::uint8_t*>(held->data());
  const std::size_t size = held->size();
  nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  held.release();
  return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {size}, owner);
}

// (path, offset, reason) are what a Python error of ours is made of.
void translate(const std::exception_ptr& raised, void* type) {
  try {
    std::rethrow_exception(raised);
  } catch (const FrozenDamage& damage) {
    const nb::tuple what = nb::make_tuple(damage.path(), damage.offset(), damage.what());
    PyErr_SetObject(static_cast<PyObject*>(type), what.ptr());
  }
}

}  // namespace

void bind_frozen(nb::module_& m) {
  const nb::object damage = nb::steal(
      PyErr_NewExceptionWithDoc("monolith.native._core.FrozenDamageError",
                                "A file makes no sense: (path, offset, reason).", PyExc_ValueError, nullptr));
  m.attr("FrozenDamageError") = damage;
  nb::register_exception_translator(translate, damage.ptr());

  nb::enum_<FrozenCoding>(m, "FrozenCoding", "How a segment's values are kept.")
      .value("FP32", FrozenCoding::kFp32)
      .value("FP16", FrozenCoding::kFp16)
      .value("INT8", FrozenCoding::kInt8)
      .value("INT4", FrozenCoding::kInt4);

  nb::class_<FrozenTable>(m, "FrozenTable", "Rows in a mapped file. Never changes. Thread-safe.")
      .def("__init__", &make, "descriptor"_a, "path"_a, "Maps the file; `path` is for messages.")
      .def_prop_ro("dim", &FrozenTable::dim)
      .def_prop_ro("rows", &FrozenTable::rows)
      .def_prop_ro("bytes", &FrozenTable::bytes)
      .def_prop_ro("checked_bytes", &FrozenTable::checked_bytes, "What `verify` can check, from 0 on.")
      .def_prop_ro("name",
                   [](const FrozenTable& self) {
                     // A name may be any bytes.
                     return nb::steal<nb::str>(PyUnicode_DecodeUTF8(
                         self.name().data(), static_cast<Py_ssize_t>(self.name().size()), "replace"));
                   })
      .def_prop_ro("segments", &segments, "(dim, coding) of each.")
      .def_prop_ro("largest_error", [](const FrozenTable& self) { return self.trailer().largest_error; })
      .def_prop_ro("mean_error", [](const FrozenTable& self) { return self.trailer().mean_error; })
      .def("lookup", &lookup, "ids"_a.noconvert(), "out"_a.noconvert(),
           "Copy one row per id into `out`; an id without a row reads as zeros.")
      .def("contains", &contains, "ids"_a.noconvert(), "found"_a.noconvert(),
           "Write to `found` whether each id has a row.")
      .def("matches", &matches, "ids"_a.noconvert(), "values"_a.noconvert(), "same"_a.noconvert(),
           "Write to `same` whether each id has a row of the bytes that its values would be written as.")
      .def("scan", &scan, "first"_a, "last"_a,
           nb::sig("def scan(self, first: int, last: int) -> tuple[NDArray[numpy.int64], "
                   "NDArray[numpy.float32]]"),
           "Ids, and their values one after another, whose hashes are from `first` to `last`.")
      .def_prop_ro("index_bytes", &FrozenTable::index_bytes)
      .def_prop_ro("kept_row_bytes", &FrozenTable::kept_row_bytes, "What a row takes of bounded memory.")
      .def(
          "bound_memory", &bound_memory, "descriptor"_a, "row_bytes"_a, "reader"_a,
          "Before the first lookup: keep the index and so many bytes of rows in memory, and read all others.")
      .def_prop_ro("cache_stats", &FrozenTable::cache_stats, "Of a table that is bounded.")
      .def("verify", &FrozenTable::verify, "start"_a, "size"_a, nb::call_guard<GilReleased>(),
           "Check bytes, in whole MiB, against their checksums.")
      .def("prefault", &FrozenTable::prefault, "start"_a, "size"_a, nb::call_guard<GilReleased>(),
           "Bring bytes of the file into memory.");

  nb::class_<RowCache::Stats>(m, "RowCacheStats", "Of the rows of a file that are kept in memory.")
      .def_ro("found", &RowCache::Stats::found, "Rows that were asked for,")
      .def_ro("in_memory", &RowCache::Stats::in_memory, "and of these without a read.")
      .def_ro("reads", &RowCache::Stats::reads)
      .def_ro("bytes_read", &RowCache::Stats::bytes_read)
      .def_ro("bytes", &RowCache::Stats::bytes, "Of memory, those of the index included.");

  nb::class_<FrozenGroup>(m, "FrozenGroup", "One call for many frozen tables. Thread-safe.")
      .def(
          "__init__",
          [](FrozenGroup* self, const std::vector<std::shared_ptr<FrozenTable>>& tables,
             std::shared_ptr<Workers> workers) {
            new (self) FrozenGroup({tables.begin(), tables.end()}, std::move(workers));
          },
          "tables"_a, "workers"_a.none() = nb::none(), "Keeps the tables alive.")
      .def("lookup", &lookup_group, "ids"_a.noconvert(), "sizes"_a.noconvert(), "num_batches"_a,
           "out"_a.noconvert(),
           "Copy one row per id into `out`; sizes[batch * tables + table] says whose ids are whose.");

  nb::class_<OverlaidGroup>(m, "OverlaidGroup",
                            "One call for many frozen tables with rows over them. Thread-safe.")
      .def(
          "__init__",
          [](OverlaidGroup* self, const std::vector<std::shared_ptr<FrozenTable>>& below,
             const std::vector<std::shared_ptr<Table>>& above, std::shared_ptr<Workers> workers) {
            new (self)
                OverlaidGroup({below.begin(), below.end()}, {above.begin(), above.end()}, std::move(workers));
          },
          "below"_a, "above"_a, "workers"_a.none() = nb::none(), "Keeps the tables alive.")
      .def("lookup", &lookup_overlaid, "ids"_a.noconvert(), "sizes"_a.noconvert(), "num_batches"_a,
           "out"_a.noconvert(), "As FrozenGroup.lookup; a row above counts, whatever is below.");

  nb::class_<FrozenWriter>(m, "FrozenWriter", "Rows into the bytes of a file, in order. Not thread-safe.")
      .def("__init__", &make_writer, "segments"_a, "name"_a, "max_rows"_a)
      .def_prop_ro("dim", &FrozenWriter::dim)
      .def_prop_ro("row_bytes", &FrozenWriter::row_bytes)
      .def_prop_ro("rows", &FrozenWriter::rows)
      .def_prop_ro("size", &FrozenWriter::bytes, "Of the file so far.")
      .def_prop_ro("crc", &FrozenWriter::crc, "Of the file so far.")
      .def_prop_ro("largest_error", &FrozenWriter::largest_error)
      .def_prop_ro("mean_error", &FrozenWriter::mean_error)
      .def("begin", &begin, "What the file begins with.")
      .def("add", &add, "ids"_a.noconvert(), "values"_a.noconvert(), "out"_a.noconvert(),
           "Write row_bytes bytes for each id to `out`.")
      .def("finish", &finish, nb::sig("def finish(self) -> NDArray[numpy.uint8]"),
           "All that follows the rows.");
}

}  // namespace monolith
