// JSON parser: objects of plain values straight to columns, with no object per record.
//
// It reads what data is made of (numbers, texts, bools, null, and lists of these) and is sure of it. Any
// other text is *odd*: malformed, of another type than its column, a key twice, NaN, a number beyond 64 bits.
// An odd text is not judged here but named, for the caller to read in another way; in our case by Python's
// `json`, which has the last word on what is JSON. So a result never depends on who has read a text.
//
//     {"user": 17, "tags": [3, 9], "price": null}      user: 17    tags: 3 9    price: no value
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "csv_parser.h"
#include "example_parser.h"

namespace monolith {

// The end of the chunk of the lines that begin in the first `chunk_bytes`; see `find_csv_chunk_end`. A line
// that is longer than `record_bytes` is cut behind one byte more, and the rest of it is another line.
ChunkEnd find_lines_chunk_end(std::string_view bytes, bool last, std::size_t chunk_bytes,
                              std::size_t record_bytes);

struct JsonColumn {
  std::string name;
  ColumnType type;
  bool whole_as_text = false;  // a column of texts takes whole numbers, too, as they are written
};

struct OddJson {
  std::size_t row;          // how many records were read before it
  std::size_t begin, size;  // where it is in the bytes; of texts, the number of the text, and its size
};

struct ParsedJson {
  std::size_t records = 0;
  std::vector<ParsedColumn> columns;  // in the order they were asked for, without names
  std::vector<OddJson> odd;           // in order
};

// Immutable, so safe to share between threads.
class JsonParser {
 public:
  // `others` are the keys that an object may have in addition to the columns, or `any_key`; an object with
  // another key is odd. Throws std::invalid_argument for a name twice.
  JsonParser(std::vector<JsonColumn> columns, const std::vector<std::string>& others, bool any_key);

  // One object per line; blank lines are none. A line of more than `record_bytes` is cut as above, and odd.
  ParsedJson parse_lines(std::string_view bytes, std::size_t record_bytes) const;

  // One object per text.
  ParsedJson parse_texts(std::span<const std::string_view> texts) const;

  static constexpr std::size_t kUnknown = static_cast<std::size_t>(-1);

 private:
  class Rows;
  std::size_t find(std::string_view key) const;

  const std::vector<JsonColumn> columns_;
  const bool any_key_;
  std::vector<std::string> keys_;                             // columns first, then others
  std::unordered_map<std::string_view, std::size_t> places_;  // of keys_, which own the texts
};

}  // namespace monolith
