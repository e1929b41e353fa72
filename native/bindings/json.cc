// Python face of the JSON parser: checks shapes, releases the GIL, adds no behaviour.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "column_block.h"
#include "json_parser.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

std::string_view text(const BorrowedBytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.span().data()), bytes.span().size()};
}

void make_parser(JsonParser* self, const std::vector<std::tuple<std::string, ColumnType, bool>>& columns,
                 const std::optional<std::vector<std::string>>& others) {
  std::vector<JsonColumn> wanted;
  for (const auto& [name, type, whole_as_text] : columns) wanted.push_back({name, type, whole_as_text});
  new (self) JsonParser(std::move(wanted), others.value_or(std::vector<std::string>()), !others);
}

nb::list odd_texts(const ParsedJson& parsed) {
  nb::list odd;
  for (const OddJson& one : parsed.odd) odd.append(nb::make_tuple(one.row, one.begin, one.size));
  return odd;
}

// The columns leave the parsed records, which have none afterwards, without an array for each of them.
ColumnBlock take_block(ParsedJson& parsed) {
  GilReleased unlocked;
  return ColumnBlock(parsed.records, std::exchange(parsed.columns, {}));
}

}  // namespace

void bind_json(nb::module_& m) {
  m.def(
      "find_lines_chunk_end",
      [](nb::handle buffer, bool last, std::size_t chunk_bytes, std::size_t record_bytes) {
        const BorrowedBytes bytes(buffer);
        GilReleased unlocked;
        const ChunkEnd end = find_lines_chunk_end(text(bytes), last, chunk_bytes, record_bytes);
        return std::pair(end.whole, end.next);
      },
      "buffer"_a, "last"_a, "chunk_bytes"_a, "record_bytes"_a,
      "(whole, end) of the chunk of lines that begin in the first `chunk_bytes`, at least one. If not whole: "
      "drop "
      "`end` bytes, and show the rest again with more. `last`: the file ends there.");

  nb::class_<ParsedJson>(m, "ParsedJson", "Records by column, and the texts that only Python can judge.")
      .def_ro("records", &ParsedJson::records)
      .def_prop_ro("odd", &odd_texts, nb::sig("def odd(self) -> list[tuple[int, int, int]]"),
                   "(records before it, begin, size), in order; of texts, begin is the number of the text.")
      .def("take_block", &take_block, nb::sig("def take_block(self) -> ColumnBlock"),
           "The columns as asked for, to gather rows of; there are none the next time.");

  nb::class_<JsonParser>(m, "JsonParser", "Objects of plain values straight to columns. Thread-safe.")
      .def("__init__", &make_parser, "columns"_a, "others"_a.none(),
           "`columns` are (key, type, whether whole numbers are taken as texts), `others` the keys to "
           "ignore; None "
           "ignores all.")
      .def(
          "parse_lines",
          [](const JsonParser& parser, nb::handle buffer, std::size_t record_bytes) {
            const BorrowedBytes bytes(buffer);
            GilReleased unlocked;
            return parser.parse_lines(text(bytes), record_bytes);
          },
          "buffer"_a, "record_bytes"_a, "Read an object per line; a longer line is cut, and odd.")
      .def(
          "parse_texts",
          [](const JsonParser& parser, const nb::list& texts, Workers* workers) {
            return parse_texts(parser, texts, workers, &ParsedJson::odd);
          },
          "texts"_a, "workers"_a.none() = nb::none(),
          nb::sig("def parse_texts(self, texts: list[bytes], workers: Workers | None = None) -> "
                  "list[ParsedJson]"),
          "Read an object per text; the texts in one part or, with workers, in several.");
}

}  // namespace monolith
