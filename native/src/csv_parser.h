// CSV parser: the bytes of a file straight to columns, with no object per record.
//
// What is read may come from anyone. A line that does not fit is reported and left out; the other lines are
// as if it had never been there.
//
// - A record is a line that ends with \n or \r\n, and continues in the next if a quote is open. An open
// quote
//   that is not closed before the file or `record_bytes` end costs one line.
// - A quote opens a field as its first character, and is one like others elsewhere; "" in quotes is one.
// - An empty field has no values. With a list separator, each part that is not empty is a value.
// - Numbers may have blanks around them, integers of 64 bits be signed or not: ids keep their bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "example_parser.h"

namespace monolith {

// Throws std::invalid_argument for characters that cannot be told from quotes, line ends or each other.
struct CsvDialect {
  CsvDialect(char delimiter, std::optional<char> separator, std::size_t record_bytes);

  char delimiter;                 // between fields
  std::optional<char> separator;  // between the values of a field
  std::size_t record_bytes;       // what is longer is cut there, and bad
};

// Finds records in a stretch of a file.
class CsvScanner {
 public:
  // `last`: the file ends where `bytes` do. Otherwise a record that may continue is not found.
  CsvScanner(std::string_view bytes, bool last, std::size_t record_bytes)
      : bytes_(bytes), last_(last), record_bytes_(record_bytes) {}

  // Goes to the next record that is more than a line end; false when there is none.
  bool next();

  std::string_view record() const { return record_; }  // with its line end
  bool quoted() const { return quoted_; }              // whether there are quotes in it
  std::size_t begin() const { return place_ - record_.size(); }
  std::size_t place() const { return place_; }  // the end of all that was found, empty lines included

 private:
  std::size_t measure();

  const std::string_view bytes_;
  const bool last_;
  const std::size_t record_bytes_;
  std::string_view record_;
  std::size_t place_ = 0;
  bool quoted_ = false;
};

// The fields of one record after the other, quotes taken off.
class CsvFields {
 public:
  explicit CsvFields(char delimiter) : delimiter_(delimiter) {}

  // Takes the fields of a record; returns why it has none, or an empty string.
  std::string split(std::string_view record, bool quoted);

  // They lie in the record or in this object, until the next one is split.
  const std::vector<std::string_view>& fields() const { return fields_; }

 private:
  std::string split_quoted(std::string_view text);

  const char delimiter_;
  std::vector<std::string_view> fields_;
  std::string unquoted_;
};

// Finds the narrowest type of each column that fits all values of the first records.
class CsvSniffer {
 public:
  // Counts only records with this number of fields, up to `rows` of them.
  CsvSniffer(CsvDialect dialect, std::size_t fields, std::size_t rows);

  // Looks at the next stretch of a file; returns how many bytes need not be shown again.
  std::size_t take(std::string_view bytes, bool last);

  bool done() const { return rows_left_ == 0; }
  std::vector<ColumnType> types() const;  // strings where there were no values

 private:
  enum Sight : std::uint8_t { kNothing, kWhole, kNumber, kText };
  void see(Sight& sight, std::string_view field) const;

  const CsvDialect dialect_;
  std::size_t rows_left_;
  std::vector<Sight> sights_;
};

// Where a chunk ends that begins with the bytes that were shown.
struct ChunkEnd {
  bool whole;  // false: show the same again with more bytes
  std::size_t
      next;  // the end, 0 if there is no record; if not whole, empty lines that need not be shown again
};

// The end of the chunk of the records that begin in the first `chunk_bytes`, or of the first record if it
// begins later: its bytes can then be parsed by any thread. `last`: the file ends where `bytes` do.
ChunkEnd find_csv_chunk_end(const CsvDialect& dialect, std::string_view bytes, bool last,
                            std::size_t chunk_bytes);

struct CsvColumn {
  std::size_t position;
  ColumnType type;
};

struct BadCsvRecord {
  std::size_t begin, size;
  std::string reason;
  std::optional<std::size_t> column;  // where a value is wrong: its column, among those that are read,
  std::string value;                  // and the beginning of the value
};

struct ParsedCsv {
  bool whole = false;  // false: show the same again with more bytes; there is nothing else here but `next`
  std::size_t next = 0;
  std::size_t records = 0;
  std::vector<ParsedColumn> columns;  // in the order they were asked for, without names
  std::vector<BadCsvRecord> bad;
};

// Immutable, so safe to share between threads.
class CsvParser {
 public:
  // Records have `fields` fields; `columns` are those to read, by rising position. What is not read is not
  // judged. Throws std::invalid_argument for other positions.
  CsvParser(CsvDialect dialect, std::size_t fields, std::vector<CsvColumn> columns);

  // Reads the records that begin in the first `chunk_bytes`, or the first one where it begins later.
  // `last`: the file ends where `bytes` do. Where they end before the chunk does, the answer is not whole,
  // and `next` skips empty lines that need not be read again.
  ParsedCsv parse(std::string_view bytes, bool last, std::size_t chunk_bytes) const;

  // Reads one record from each text, which is one line, with or without its end. What is bad begins at the
  // number of its text.
  ParsedCsv parse_texts(std::span<const std::string_view> texts) const;

 private:
  ParsedCsv no_records() const;
  void add(ParsedCsv& parsed, CsvFields& fields, std::size_t begin, std::string_view record,
           bool quoted) const;

  const CsvDialect dialect_;
  const std::size_t fields_;
  const std::vector<CsvColumn> columns_;
};

}  // namespace monolith
