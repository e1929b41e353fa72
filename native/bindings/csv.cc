// Python face of the CSV parser: checks shapes, releases the GIL, adds no behaviour.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "column_block.h"
#include "csv_parser.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

std::string_view text(const BorrowedBytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.span().data()), bytes.span().size()};
}

void make_dialect(CsvDialect* self, const std::string& delimiter, const std::optional<std::string>& separator,
                  std::size_t record_bytes) {
  if (delimiter.size() != 1 || (separator && separator->size() != 1))
    throw nb::value_error("CsvDialect: separators are one ASCII character each");
  new (self)
      CsvDialect(delimiter[0], separator ? std::optional((*separator)[0]) : std::nullopt, record_bytes);
}

void make_parser(CsvParser* self, const CsvDialect& dialect, std::size_t fields,
                 const std::vector<std::pair<std::size_t, ColumnType>>& columns) {
  std::vector<CsvColumn> wanted;
  for (const auto& [position, type] : columns) wanted.push_back({position, type});
  new (self) CsvParser(dialect, fields, std::move(wanted));
}

nb::tuple first_record(const CsvDialect& dialect, nb::handle buffer, bool last) {
  const BorrowedBytes bytes(buffer);
  CsvScanner scanner(text(bytes), last, dialect.record_bytes);
  if (!scanner.next()) return nb::make_tuple(scanner.place(), nb::none());
  CsvFields fields(dialect.delimiter);
  if (const std::string reason = fields.split(scanner.record(), scanner.quoted()); !reason.empty())
    throw nb::value_error(reason.c_str());
  nb::list found;
  for (const std::string_view field : fields.fields()) found.append(nb::bytes(field.data(), field.size()));
  return nb::make_tuple(scanner.place(), found);
}

nb::list bad_records(const ParsedCsv& parsed) {
  nb::list bad;
  for (const BadCsvRecord& one : parsed.bad)
    bad.append(nb::make_tuple(one.begin, one.size, one.reason, one.column,
                              nb::bytes(one.value.data(), one.value.size())));
  return bad;
}

// The columns leave the parsed records, which have none afterwards, without an array for each of them.
ColumnBlock take_block(ParsedCsv& parsed) {
  GilReleased unlocked;
  return ColumnBlock(parsed.records, std::exchange(parsed.columns, {}));
}

}  // namespace

void bind_csv(nb::module_& m) {
  nb::enum_<ColumnType>(m, "ColumnType", "What the values of a column are.")
      .value("INT64", ColumnType::kInt64)
      .value("FLOAT", ColumnType::kFloat)
      .value("BYTES", ColumnType::kBytes);

  nb::class_<CsvDialect>(m, "CsvDialect", "What separates fields and the values in them.")
      .def("__init__", &make_dialect, "delimiter"_a, "list_separator"_a.none(), "record_bytes"_a,
           "A record that is longer than `record_bytes` is cut there, and bad.");

  m.def("first_csv_record", &first_record, "dialect"_a, "buffer"_a, "last"_a,
        nb::sig("def first_csv_record(dialect: CsvDialect, buffer: object, last: bool) -> tuple[int, "
                "list[bytes] | None]"),
        "(its end, its fields); None if the buffer, which `last` calls the file's end, has none. "
        "ValueError if it is no record.");

  m.def(
      "find_csv_chunk_end",
      [](const CsvDialect& dialect, nb::handle buffer, bool last, std::size_t chunk_bytes) {
        const BorrowedBytes bytes(buffer);
        GilReleased unlocked;
        const ChunkEnd end = find_csv_chunk_end(dialect, text(bytes), last, chunk_bytes);
        return std::pair(end.whole, end.next);
      },
      "dialect"_a, "buffer"_a, "last"_a, "chunk_bytes"_a,
      "(whole, end) of the chunk of records that begin in the first `chunk_bytes`, at least one. If not "
      "whole: drop "
      "`end` bytes, and show the rest again with more. `last`: the file ends there.");

  nb::class_<CsvSniffer>(m, "CsvSniffer", "Finds the narrowest types that fit the first records.")
      .def(nb::init<CsvDialect, std::size_t, std::size_t>(), "dialect"_a, "fields"_a, "rows"_a,
           "Counts records with this number of fields, up to `rows` of them.")
      .def(
          "take",
          [](CsvSniffer& sniffer, nb::handle buffer, bool last) {
            const BorrowedBytes bytes(buffer);
            GilReleased unlocked;
            return sniffer.take(text(bytes), last);
          },
          "buffer"_a, "last"_a, "Look at the next bytes; return how many need not be shown again.")
      .def_prop_ro("done", &CsvSniffer::done, "Whether there were records enough.")
      .def_prop_ro("types", &CsvSniffer::types, "Of each column; BYTES where there were no values.");

  nb::class_<ParsedCsv>(m, "ParsedCsv", "Records by column, and the lines that were none.")
      .def_ro("whole", &ParsedCsv::whole, "If not: drop `next` bytes, and show the rest again with more.")
      .def_ro("next", &ParsedCsv::next, "The position in the buffer to continue from.")
      .def_ro("records", &ParsedCsv::records)
      .def_prop_ro(
          "bad", &bad_records, nb::sig("def bad(self) -> list[tuple[int, int, str, int | None, bytes]]"),
          "(begin, size, reason, column, value), in order; a column where its value is what is wrong.")
      .def("take_block", &take_block, nb::sig("def take_block(self) -> ColumnBlock"),
           "The columns as asked for, to gather rows of; there are none the next time.");

  nb::class_<CsvParser>(m, "CsvParser", "Bytes of CSV straight to columns. Thread-safe.")
      .def(
          "__init__", &make_parser, "dialect"_a, "fields"_a, "columns"_a,
          "Records have this number of fields; `columns` are (position, type) of those to read, by position.")
      .def(
          "parse",
          [](const CsvParser& parser, nb::handle buffer, bool last, std::size_t chunk_bytes) {
            const BorrowedBytes bytes(buffer);
            GilReleased unlocked;
            return parser.parse(text(bytes), last, chunk_bytes);
          },
          "buffer"_a, "last"_a, "chunk_bytes"_a,
          "Read the records that begin in the first `chunk_bytes`, at least one. `last`: the file ends "
          "there.")
      .def(
          "parse_texts",
          [](const CsvParser& parser, const nb::list& texts, Workers* workers) {
            return parse_texts(parser, texts, workers, &ParsedCsv::bad);
          },
          "texts"_a, "workers"_a.none() = nb::none(),
          nb::sig("def parse_texts(self, texts: list[bytes], workers: Workers | None = None) -> "
                  "list[ParsedCsv]"),
          "Read a record from each text, which is one line; in one part or, with workers, in several. What "
          "is bad begins at the number of its text.");
}

}  // namespace monolith
