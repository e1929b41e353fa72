// Python face of the example parser and writer, and of the streams their payloads lie in: checks
// shapes, releases the GIL, adds no behaviour.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "example_parser.h"
#include "example_writer.h"
#include "frames.h"
#include "tfrecord.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Splits = Column<std::int64_t>;

std::vector<Payload> payloads(std::span<const std::byte> buffer, const Splits& offsets,
                              const Splits& lengths) {
  if (offsets.size() != lengths.size())
    throw nb::value_error("payloads: `offsets` and `lengths` must be of one length");
  std::vector<Payload> found;
  found.reserve(offsets.size());
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const auto offset = static_cast<std::uint64_t>(offsets.data()[i]);
    const auto length = static_cast<std::uint64_t>(lengths.data()[i]);
    if (offset > buffer.size() || length > buffer.size() - offset)
      throw nb::value_error("payloads: an offset or length reaches beyond the buffer");
    found.push_back(buffer.subspan(offset, length));
  }
  return found;
}

ParsedExamples parse(const ExampleParser& parser, nb::handle buffer, const Splits& offsets,
                     const Splits& lengths) {
  const BorrowedBytes bytes(buffer);
  const auto found = payloads(bytes.span(), offsets, lengths);
  GilReleased unlocked;
  return parser.parse(found);
}

std::vector<ParsedExamples> parse_batches(const ExampleParser& parser, nb::handle buffer,
                                          const Splits& offsets, const Splits& lengths) {
  const BorrowedBytes bytes(buffer);
  const auto found = payloads(bytes.span(), offsets, lengths);
  GilReleased unlocked;
  return parser.parse_batches(found);
}

// The columns leave the parsed examples, which have none afterwards.
nb::list take_columns(ParsedExamples& parsed) {
  nb::list columns;
  for (ParsedColumn& column : parsed.columns) {
    nb::object values = column.type == ColumnType::kInt64   ? nb::cast(owned(std::move(column.ints)))
                        : column.type == ColumnType::kFloat ? nb::cast(owned(std::move(column.floats)))
                                                            : nb::cast(owned(std::move(column.bytes)));
    nb::object inner =
        column.type == ColumnType::kBytes ? nb::cast(owned(std::move(column.inner))) : nb::object(nb::none());
    columns.append(
        nb::make_tuple(column.name, column.shared, values, owned(std::move(column.splits)), inner));
  }
  parsed.columns.clear();
  return columns;
}

// The columns of one call to write, pinned while this lives.
struct ColumnInput {
  std::optional<Column<std::int64_t>> ints;
  std::optional<Column<float>> floats;
  std::optional<Column<std::uint8_t>> bytes;
  Splits splits;
  std::optional<Splits> inner;
};

nb::tuple encode(ExampleKind kind, std::size_t records, const nb::list& columns, Workers* workers) {
  std::vector<ColumnInput> inputs;
  std::vector<ColumnView> views;
  for (nb::handle item : columns) {
    const auto column = nb::cast<nb::tuple>(item);
    if (column.size() != 6) throw nb::value_error("a column is (name, shared, ids, values, splits, inner)");
    ColumnInput input;
    ColumnView view;
    view.name = nb::cast<std::string>(column[0]);
    view.shared = nb::cast<bool>(column[1]);
    view.ids = nb::cast<bool>(column[2]);
    input.splits = nb::cast<Splits>(column[4], false);
    view.splits = as_span(input.splits);
    if (!column[5].is_none()) {
      view.type = ColumnType::kBytes;
      input.bytes = nb::cast<Column<std::uint8_t>>(column[3], false);
      input.inner = nb::cast<Splits>(column[5], false);
      view.bytes = as_span(*input.bytes);
      view.inner = as_span(*input.inner);
    } else if (nb::try_cast(column[3], input.ints, false)) {
      view.ints = as_span(*input.ints);
    } else {
      view.type = ColumnType::kFloat;
      input.floats = nb::cast<Column<float>>(column[3], false);
      view.floats = as_span(*input.floats);
    }
    inputs.push_back(std::move(input));
    views.push_back(std::move(view));
  }
  EncodedExamples encoded;
  {
    GilReleased unlocked;
    encoded = encode_examples(kind, records, views, workers);
  }
  return nb::make_tuple(nb::bytes(encoded.data.data(), encoded.data.size()),
                        owned(std::move(encoded.splits)));
}

template <auto Member>
auto column(nb::handle_t<SplitStream> self) {
  auto& data = nb::cast<SplitStream&>(self).*Member;
  return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(data.data(), {data.size()}, self);
}

template <class Seal>
nb::bytes sealed(nb::handle data, Seal&& seal) {
  const BorrowedBytes bytes(data);
  std::vector<std::byte> result;
  {
    GilReleased unlocked;
    result = seal(bytes.span());
  }
  return nb::bytes(result.data(), result.size());
}

void bind_streams(nb::module_& m) {
  nb::class_<SplitStream>(m, "SplitStream", "The whole records that a buffer begins with.")
      .def_prop_ro("starts", &column<&SplitStream::starts>, "Where each record begins.")
      .def_prop_ro("offsets", &column<&SplitStream::offsets>, "Where each payload begins.")
      .def_prop_ro("lengths", &column<&SplitStream::lengths>, "The bytes of each payload.")
      .def_prop_ro("headers", &column<&SplitStream::headers>, "Frames with a tag: that number of each.")
      .def_ro("consumed", &SplitStream::consumed, "Bytes of whole records; a failure begins there.")
      .def_ro("failure", &SplitStream::failure, "Why splitting stopped before the end; empty if it did not.")
      .def_ro("truncated", &SplitStream::truncated,
              "Whether the failure is that the buffer ends inside a record: more bytes may mend it.");

  nb::class_<FrameHeader>(m, "FrameHeader", "What stands before the length of a frame.")
      .def(
          "__init__",
          [](FrameHeader* self, bool tag, bool kafka_dump_prefix, bool sort_id, bool kafka_dump) {
            new (self) FrameHeader{tag, kafka_dump_prefix, sort_id, kafka_dump};
          },
          nb::kw_only(), "tag"_a = false, "kafka_dump_prefix"_a = false, "sort_id"_a = false,
          "kafka_dump"_a = false);

  m.def(
      "split_tfrecords",
      [](nb::handle buffer) {
        const BorrowedBytes bytes(buffer);
        GilReleased unlocked;
        return split_records(bytes.span());
      },
      "buffer"_a, "Find the payloads of TFRecords, checksums checked, up to the first bad record.");
  m.def(
      "split_frames",
      [](nb::handle buffer, const FrameHeader& header) {
        const BorrowedBytes bytes(buffer);
        GilReleased unlocked;
        return split_frames(bytes.span(), header);
      },
      "buffer"_a, "header"_a, "Find the payloads of frames, up to the first bad one.");
  m.def(
      "seal_tfrecords",
      [](nb::handle data, const Splits& splits) {
        return sealed(data,
                      [&](std::span<const std::byte> bytes) { return seal_records(bytes, as_span(splits)); });
      },
      "data"_a, "splits"_a.noconvert(), "Payloads data[splits[i]:splits[i + 1]] as TFRecords.");
  m.def(
      "seal_frames",
      [](nb::handle data, const Splits& splits, const FrameHeader& header, const Splits& tags) {
        return sealed(data, [&](std::span<const std::byte> bytes) {
          return seal_frames(bytes, as_span(splits), header, as_span(tags));
        });
      },
      "data"_a, "splits"_a.noconvert(), "header"_a, "tags"_a.noconvert(),
      "Payloads data[splits[i]:splits[i + 1]] as frames; `tags` has one each if the header has a tag.");
}

}  // namespace

void bind_examples(nb::module_& m) {
  bind_streams(m);

  nb::enum_<ExampleKind>(m, "ExampleKind", "The messages that carry examples.")
      .value("TF_EXAMPLE", ExampleKind::kTfExample)
      .value("EXAMPLE", ExampleKind::kExample)
      .value("INSTANCE", ExampleKind::kInstance)
      .value("EXAMPLE_BATCH", ExampleKind::kExampleBatch);

  nb::class_<ParsedExamples>(m, "ParsedExamples", "Records by column, and the payloads that were none.")
      .def_ro("records", &ParsedExamples::records)
      .def_prop_ro(
          "bad",
          [](const ParsedExamples& parsed) {
            std::vector<std::pair<std::size_t, std::string>> bad;
            for (const auto& [index, reason] : parsed.bad) bad.emplace_back(index, reason);
            return bad;
          },
          "(index of the payload, reason), by index.")
      .def("take_columns", &take_columns,
           nb::sig("def take_columns(self) -> list[tuple[str, bool, NDArray[numpy.int64] | "
                   "NDArray[numpy.float32] | NDArray[numpy.uint8], NDArray[numpy.int64], "
                   "NDArray[numpy.int64] | None]]"),
           "(name, shared, values, row splits, splits of strings) by name; there are none the next time.");

  nb::class_<ExampleParser>(m, "ExampleParser", "Payloads straight to columns. Thread-safe.")
      .def(nb::init<ExampleKind, std::optional<std::vector<std::string>>, std::shared_ptr<Workers>>(),
           "kind"_a, "columns"_a.none() = nb::none(), "workers"_a.none() = nb::none(),
           "`columns` are those to read; None is all.")
      .def("parse", &parse, "buffer"_a, "offsets"_a.noconvert(), "lengths"_a.noconvert(),
           "One record per payload, bad ones left out. Not for EXAMPLE_BATCH.")
      .def("parse_batches", &parse_batches, "buffer"_a, "offsets"_a.noconvert(), "lengths"_a.noconvert(),
           "EXAMPLE_BATCH: one answer per payload.");

  m.def("encode_examples", &encode, "kind"_a, "records"_a, "columns"_a, "workers"_a.none() = nb::none(),
        nb::sig("def encode_examples(kind: ExampleKind, records: int, columns: list[tuple[str, bool, bool, "
                "NDArray[numpy.int64] | NDArray[numpy.float32] | NDArray[numpy.uint8], NDArray[numpy.int64], "
                "NDArray[numpy.int64] | None]], workers: Workers | None = None) -> tuple[bytes, "
                "NDArray[numpy.int64]]"),
        "(payloads end to end, their splits) of columns (name, shared, ids, values, row splits, splits of "
        "strings).");
}

}  // namespace monolith
