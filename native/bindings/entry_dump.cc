// Python face of monolith::EntryDumpCodec: checks shapes, releases the GIL, adds no behaviour.
#include "entry_dump.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "snappy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
using Rows = Matrix<float>;
using Segments = std::vector<std::pair<std::string, std::size_t>>;

void construct(EntryDumpCodec* self, const Segments& named) {
  std::vector<DumpSegment> segments;
  for (const auto& [name, dim] : named) segments.push_back({optimizer_kind(name), dim});
  new (self) EntryDumpCodec(std::move(segments));
}

EntryColumns columns(const EntryDumpCodec& codec, const std::optional<Ids>& ids, const Ids& event_times,
                     const Rows& values, const Rows& state) {
  const std::size_t n = event_times.size();
  if (ids && ids->size() != n)
    throw nb::value_error("entry dump: `ids` and `event_times` must be of one length");
  if (values.shape(0) != n || values.shape(1) != codec.dim())
    throw nb::value_error("entry dump: `values` must have shape (len(event_times), dim)");
  if (state.shape(0) != n || state.shape(1) != codec.state_dim())
    throw nb::value_error("entry dump: `state` must have shape (len(event_times), state_dim)");
  EntryColumns rows{{}, as_span(event_times), as_span(values), as_span(state)};
  if (ids) rows.ids = as_span(*ids);
  return rows;
}

// A bytes object of `size`, to be written before anyone else sees it.
std::pair<nb::bytes, std::span<std::byte>> blank_bytes(std::size_t size) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (object == nullptr) throw nb::python_error();
  return {nb::steal<nb::bytes>(object), {reinterpret_cast<std::byte*>(PyBytes_AsString(object)), size}};
}

nb::bytes encode(const EntryDumpCodec& codec, const Ids& ids, const Ids& event_times, const Rows& values,
                 const Rows& state) {
  const EntryColumns rows = columns(codec, ids, event_times, values, state);
  std::size_t size = 0;
  {
    GilReleased unlocked;
    size = codec.encoded_size(rows);
  }
  auto [result, place] = blank_bytes(size);
  {
    GilReleased unlocked;
    codec.encode(rows, place);
  }
  return std::move(result);
}

std::vector<nb::bytes> encode_messages(const EntryDumpCodec& codec, const std::optional<Ids>& ids,
                                       const Ids& event_times, const Rows& values, const Rows& state) {
  const EntryColumns rows = columns(codec, ids, event_times, values, state);
  std::vector<nb::bytes> messages;
  std::vector<std::span<std::byte>> places;
  for (const std::size_t size : codec.message_sizes(rows)) {
    auto [message, place] = blank_bytes(size);
    messages.push_back(std::move(message));
    places.push_back(place);
  }
  {
    GilReleased unlocked;
    codec.encode_messages(rows, places);
  }
  return messages;
}

DecodedEntries decode(const EntryDumpCodec& codec, nb::handle buffer, std::optional<std::size_t> limit) {
  const BorrowedBytes bytes(buffer);
  GilReleased unlocked;
  return codec.decode(bytes.span(), limit.value_or(SIZE_MAX));
}

nb::bytes decompress(nb::handle block) {
  const BorrowedBytes bytes(block);
  std::vector<std::byte> out;
  std::string failure;
  {
    GilReleased unlocked;
    failure = snappy_decode(bytes.span(), out);
  }
  if (!failure.empty()) throw nb::value_error(failure.c_str());
  return nb::bytes(out.data(), out.size());
}

// Columns show the memory of the DecodedEntries they keep alive.
template <auto Member>
auto column(nb::handle_t<DecodedEntries> self) {
  auto& data = nb::cast<DecodedEntries&>(self).*Member;
  using T = typename std::remove_reference_t<decltype(data)>::value_type;
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data.data(), {data.size()}, self);
}

template <auto Member, auto Width>
auto matrix(nb::handle_t<DecodedEntries> self) {
  auto& entries = nb::cast<DecodedEntries&>(self);
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>((entries.*Member).data(),
                                                    {entries.ids.size(), entries.*Width}, self);
}

}  // namespace

void bind_entry_dump(nb::module_& m) {
  nb::class_<DecodedEntries>(m, "DecodedEntries",
                             "Rows read from EntryDump records, and how far reading got.")
      .def_prop_ro("ids", &column<&DecodedEntries::ids>, "int64 of shape (n,).")
      .def_prop_ro("event_times", &column<&DecodedEntries::event_times>, "int64 of shape (n,).")
      .def_prop_ro("values", &matrix<&DecodedEntries::values, &DecodedEntries::dim>,
                   "float32 of shape (n, dim).")
      .def_prop_ro("state", &matrix<&DecodedEntries::state, &DecodedEntries::state_dim>,
                   "float32 of shape (n, state_dim); a segment whose state was not in the record is zeros.")
      .def_prop_ro("state_missing", &column<&DecodedEntries::state_missing>,
                   "uint8 of shape (n,): 1 where a segment's state was not in the record.")
      .def_ro("consumed", &DecodedEntries::consumed, "Bytes read as whole records.")
      .def_prop_ro(
          "failure",
          [](const DecodedEntries& entries) -> std::optional<std::pair<std::size_t, std::string>> {
            if (!entries.failure) return std::nullopt;
            return std::pair(entries.failure->offset, entries.failure->reason);
          },
          "(offset of the record, reason) where reading stopped short of the end, else None.")
      .def_prop_ro(
          "truncated",
          [](const DecodedEntries& entries) { return entries.failure && entries.failure->truncated; },
          "Whether the failure is that the buffer ends inside a record: more bytes may mend it.");

  nb::class_<EntryDumpCodec>(m, "EntryDumpCodec",
                             "Rows as columns to EntryDump messages and back. Thread-safe.")
      .def("__init__", &construct, "segments"_a, "`segments` are (optimizer name, dim).")
      .def_prop_ro("dim", &EntryDumpCodec::dim)
      .def_prop_ro("state_dim", &EntryDumpCodec::state_dim)
      .def("encode", &encode, "ids"_a.noconvert(), "event_times"_a.noconvert(), "values"_a.noconvert(),
           "state"_a.noconvert(), "All rows as TFRecords, one after another.")
      .def("encode_messages", &encode_messages, "ids"_a.noconvert().none(), "event_times"_a.noconvert(),
           "values"_a.noconvert(), "state"_a.noconvert(),
           "One EntryDump message per row, unframed; with `ids` None the messages carry no id.")
      .def("decode", &decode, "buffer"_a, "limit"_a.none() = nb::none(),
           "Read TFRecords until the end, the first bad one, or `limit` of them; see `failure`.");
  m.def("snappy_decode", &decompress, "block"_a,
        "Decompress one snappy block. Raises ValueError, which says why, if it is not valid.");
}

}  // namespace monolith
