// Python face of monolith::TieredTable: checks shapes, releases the GIL, adds no behaviour.
#include "tiered_table.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "chunks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutFloats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

void check_rows(const OutFloats& out, std::size_t rows, int width) {
  check(out.shape(0) == rows && out.shape(1) == static_cast<std::size_t>(width),
        "rows must have shape (len(ids), width)");
}

void lookup(TieredTable& table, const Ids& ids, const OutFloats& out) {
  check_rows(out, ids.size(), table.dim());
  GilReleased unlocked;
  table.lookup(as_span(ids), out.data());
}

void lookup_rows(TieredTable& table, const Ids& ids, const Out<std::uint8_t>& found,
                 const Out<std::int64_t>& times, const OutFloats& values, const OutFloats& state) {
  check(found.size() == ids.size() && times.size() == ids.size(),
        "found and times must have one entry per id");
  check_rows(values, ids.size(), table.dim());
  check_rows(state, ids.size(), table.state_dim());
  GilReleased unlocked;
  table.lookup_rows(as_span(ids), found.data(), times.data(), values.data(), state.data());
}

void contains(TieredTable& table, const Ids& ids, const Out<std::uint8_t>& found) {
  check(found.size() == ids.size(), "found must have one entry per id");
  GilReleased unlocked;
  table.lookup_rows(as_span(ids), found.data(), nullptr, nullptr, nullptr);
}

std::size_t count_missing(TieredTable& table, const Ids& ids) {
  GilReleased unlocked;
  return table.count_missing(as_span(ids));
}

std::size_t remove(TieredTable& table, const Ids& ids) {
  GilReleased unlocked;
  return table.remove(as_span(ids));
}

void read_blocks(BlockReader& reader, int descriptor, const Ids& offsets, std::size_t block_bytes) {
  check(block_bytes > 0 && block_bytes % 4096 == 0, "block_bytes must be a multiple of 4096");
  std::vector<BlockReader::Read> reads;
  {
    GilReleased unlocked;
    const std::unique_ptr<std::byte, decltype(&std::free)> into(
        static_cast<std::byte*>(
            std::aligned_alloc(4096, std::max<std::size_t>(offsets.size(), 1) * block_bytes)),
        &std::free);
    if (into == nullptr) throw std::bad_alloc();
    for (std::byte* at = into.get(); const std::int64_t offset : as_span(offsets)) {
      reads.push_back({descriptor, static_cast<std::uint64_t>(offset), block_bytes, at});
      at += block_bytes;
    }
    reader.run(reads);
  }
  for (const BlockReader::Read& read : reads) {
    if (read.error == 0) continue;
    errno = read.error > 0 ? read.error : EIO;  // a file that ends too early
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

void digests(TieredTable& table, const Ids& buckets, std::uint64_t number, std::uint64_t total,
             const Out<std::uint64_t>& sums) {
  check(sums.size() == buckets.size(), "sums must have one entry per bucket");
  GilReleased unlocked;
  table.digests(as_span(buckets), number, total, sums.data());
}

nb::tuple scan_cold(TieredTable& table, std::uint64_t cursor, std::uint64_t last, std::size_t limit,
                    bool of_snapshot, bool changed_only, bool unlinked) {
  Chunk chunk;
  {
    GilReleased unlocked;
    chunk = table.scan_cold(cursor, last, limit, of_snapshot, changed_only, unlinked);
  }
  return columns_of(std::move(chunk), table.dim(), table.state_dim());
}

// (path, rows, alive rows, a bit for each row) for each file.
nb::list links(TieredTable& table) {
  std::vector<ColdLink> found;
  {
    GilReleased unlocked;
    found = table.links();
  }
  nb::list all;
  for (ColdLink& link : found)
    all.append(nb::make_tuple(link.path, link.rows, link.alive_rows, owned(std::move(link.alive))));
  return all;
}

std::size_t adopt(TieredTable& table, const std::string& path, const Column<std::uint8_t>& alive) {
  GilReleased unlocked;
  return table.adopt(path, as_span(alive));
}

std::int64_t bad_block(nb::handle blocks, std::size_t block_bytes, std::uint32_t stamp,
                       std::uint64_t number) {
  const BorrowedBytes bytes(blocks);
  GilReleased unlocked;
  return first_bad_block(bytes.span(), block_bytes, stamp, number);
}

// (path, offset, reason) are what a Python error of ours is made of.
void translate(const std::exception_ptr& raised, void* type) {
  try {
    std::rethrow_exception(raised);
  } catch (const ColdDamage& damage) {
    const nb::tuple what = nb::make_tuple(damage.path(), damage.offset(), damage.what());
    PyErr_SetObject(static_cast<PyObject*>(type), what.ptr());
  }
}

}  // namespace

void bind_tiered_table(nb::module_& m) {
  const nb::object damage = nb::steal(PyErr_NewExceptionWithDoc(
      "monolith.native._core.ColdDamageError", "A cold file makes no sense: (path, offset, reason).",
      PyExc_ValueError, nullptr));
  m.attr("ColdDamageError") = damage;
  nb::register_exception_translator(translate, damage.ptr());

  m.def("first_bad_block", &bad_block, "blocks"_a, "block_bytes"_a, "stamp"_a, "number"_a,
        "Of blocks of a cold file, from block `number` on, the index of the first that is not as it was "
        "written; -1 if all are.");

  nb::class_<BlockReader>(m, "BlockReader", "Threads that read blocks of files; tables may share them.")
      .def(nb::init<int>(), "threads"_a = 32)
      .def_prop_ro("threads", &BlockReader::threads)
      .def("read", &read_blocks, "descriptor"_a, "offsets"_a.noconvert(), "block_bytes"_a,
           "Read a block at each offset and drop it: to time a disk.");

  nb::class_<TierSizes>(m, "TierSizes", "What a tiered table of so many rows takes, reckoned without one.")
      .def(nb::init<std::size_t, std::uint64_t, std::size_t, std::size_t, std::uint64_t>(), nb::kw_only(),
           "row_bytes"_a, "memory_bytes"_a, "buffer_bytes"_a, "recent_bytes"_a, "rows"_a)
      .def_ro("hot_rows", &TierSizes::hot_rows, "Rows that fit into the memory.")
      .def_ro("hot_bytes", &TierSizes::hot_bytes, "Memory of a hot row with all that belongs to it.")
      .def_ro("index_bytes", &TierSizes::index_bytes, "Memory of the index of the cold rows.")
      .def_ro("record_bytes", &TierSizes::record_bytes, "Of a row in a file.")
      .def_ro("block_bytes", &TierSizes::block_bytes, "Of one read.")
      .def_ro("file_bytes", &TierSizes::file_bytes,
              "Of a row in a file, with its part of blocks and directory.");

  nb::class_<ColdStats>(m, "ColdStats")
      .def_ro("rows", &ColdStats::rows)
      .def_ro("files", &ColdStats::files)
      .def_ro("bytes_index", &ColdStats::bytes_index)
      .def_ro("bytes_buffers", &ColdStats::bytes_buffers)
      .def_ro("bytes_recent", &ColdStats::bytes_recent)
      .def_ro("bytes_files", &ColdStats::bytes_files)
      .def_ro("bytes_live", &ColdStats::bytes_live)
      .def_ro("rows_found", &ColdStats::rows_found)
      .def_ro("rows_recent", &ColdStats::rows_recent)
      .def_ro("reads", &ColdStats::reads)
      .def_ro("bytes_read", &ColdStats::bytes_read)
      .def_ro("rows_written", &ColdStats::rows_written)
      .def_ro("bytes_written", &ColdStats::bytes_written)
      .def_ro("compactions", &ColdStats::compactions)
      .def_ro("rows_compacted", &ColdStats::rows_compacted);

  nb::class_<TieredTable::Expiry>(m, "TieredExpiry", "How far rows of a tiered table have expired.");

  nb::class_<TieredTable>(m, "TieredTable", "A table with its hot rows in memory and all others in files.")
      .def(
          "__init__",
          [](TieredTable* self, std::shared_ptr<Table> hot, std::shared_ptr<BlockReader> reader,
             const std::string& folder, const std::string& name, std::uint64_t memory_bytes,
             std::uint64_t most_hot_rows, std::uint64_t buffer_bytes, std::uint64_t recent_bytes) {
            ColdSpec cold{folder, name, hot->row_bytes(), buffer_bytes, recent_bytes};
            new (self) TieredTable(std::move(hot), {memory_bytes, most_hot_rows}, std::move(cold),
                                   std::move(reader));
          },
          nb::kw_only(), "hot"_a, "reader"_a, "folder"_a, "name"_a, "memory_bytes"_a, "most_hot_rows"_a,
          "buffer_bytes"_a, "recent_bytes"_a)
      .def_prop_ro("cold_rows", &TieredTable::cold_rows)
      .def_prop_ro("hot_rows_allowed", &TieredTable::hot_rows_allowed)
      .def_prop_ro("most_rows", &TieredTable::most_rows,
                   "Rows for which the memory has an index; new ids beyond them are refused.")
      .def_prop_ro("cold_memory_bytes", &TieredTable::cold_memory_bytes,
                   "Bytes of memory other than those of the hot table.")
      .def_prop_ro("evicted", &TieredTable::evicted, "Cold rows that expired.")
      .def_prop_ro("removed", &TieredTable::removed, "Cold rows that were removed.")
      .def_prop_ro("must_shrink", &TieredTable::must_shrink)
      .def_prop_ro("trouble", &TieredTable::trouble, "Why nothing can be written; empty if it can.")
      .def("lookup", &lookup, "ids"_a.noconvert(), "out"_a.noconvert())
      .def("lookup_rows", &lookup_rows, "ids"_a.noconvert(), "found"_a.noconvert(), "times"_a.noconvert(),
           "values"_a.noconvert(), "state"_a.noconvert())
      .def("contains", &contains, "ids"_a.noconvert(), "found"_a.noconvert())
      .def("remove", &remove, "ids"_a.noconvert(), "Remove rows of either tier; moves no cold row in.")
      .def("count_missing", &count_missing, "ids"_a.noconvert(),
           "Note a batch that is to be written; returns how many distinct ids have no hot row.")
      .def("spill", &TieredTable::spill, "incoming"_a, nb::call_guard<GilReleased>(),
           "Move some hot rows out if so many more do not fit; returns how many are still too many.")
      .def("bring", &TieredTable::bring, "elsewhere"_a = 0, nb::call_guard<GilReleased>(),
           "Move the cold rows of the batch in; returns how many of its ids have no row. New ids leave "
           "room in the index for so many rows that are elsewhere.")
      .def("shrink", &TieredTable::shrink, nb::call_guard<GilReleased>(),
           "Give back memory that hot rows no longer need.")
      .def("wait_for_room", &TieredTable::wait_for_room, "seconds"_a, nb::call_guard<GilReleased>())
      .def("flush", &TieredTable::flush, nb::call_guard<GilReleased>(),
           "Wait until everything is written and compacted.")
      .def("count_expired", &TieredTable::count_expired, "now"_a, nb::call_guard<GilReleased>())
      .def(
          "expiry",
          [](const TieredTable& table, std::int64_t now) { return TieredTable::Expiry(table, now); }, "now"_a)
      .def("find_expired", &TieredTable::find_expired, "expiry"_a, nb::call_guard<GilReleased>(),
           "Find the next expired rows, while others write; False if there are no more.")
      .def("drop_expired", &TieredTable::drop_expired, "expiry"_a, nb::call_guard<GilReleased>(),
           "Drop what find_expired found; returns how many.")
      .def("clear", &TieredTable::clear, "rows"_a = 0, nb::call_guard<GilReleased>())
      .def("digests", &digests, "buckets"_a.noconvert(), "number"_a, "total"_a, "sums"_a.noconvert())
      .def("scan_cold", &scan_cold, "cursor"_a, "last"_a, "limit"_a, "of_snapshot"_a, "changed_only"_a,
           "unlinked"_a,
           nb::sig("def scan_cold(self, cursor: int, last: int, limit: int, of_snapshot: bool, "
                   "changed_only: bool, unlinked: bool) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], "
                   "NDArray[numpy.float32], NDArray[numpy.float32], int | None]"))
      .def("track_changes", &TieredTable::track_changes, "on"_a, nb::call_guard<GilReleased>())
      .def("open_snapshot", &TieredTable::open_snapshot, nb::call_guard<GilReleased>(),
           "Returns how many cold rows there are.")
      .def("close_snapshot", &TieredTable::close_snapshot, "saved"_a, nb::call_guard<GilReleased>())
      .def("links", &links, nb::sig("def links(self) -> list[tuple[str, int, int, NDArray[numpy.uint8]]]"),
           "Files that a checkpoint of the open snapshot may link to: path, rows, those in the snapshot, and "
           "a bit for each row. `scan_cold` leaves these rows out if `unlinked`.")
      .def("adopt", &adopt, "path"_a, "alive"_a.noconvert(),
           "Take over the rows of a file in this table's folder that have a bit; returns how many.")
      .def_prop_ro("adopted", &TieredTable::adopted, "Rows of adopted files, since the table was made.")
      .def("stats", &TieredTable::stats, nb::call_guard<GilReleased>());
}

}  // namespace monolith
