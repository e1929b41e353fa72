// ColumnBlock: what rows are gathered from, as Python hands it around.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "gil_released.h"
#include "row_gather.h"
#include "tensors.h"
#include "workers.h"

namespace monolith {

// The columns of some records, over memory that it keeps alive. Immutable, but for its marks.
class ColumnBlock {
 public:
  ColumnBlock(std::size_t rows, const nanobind::list& columns, const nanobind::tuple& types) : rows_(rows) {
    if (types.size() != 3) throw std::invalid_argument("ColumnBlock: types are those of bytes, ints, floats");
    const TensorReader tensors(types[0], types[1], types[2]);
    columns_.reserve(columns.size());
    for (const nanobind::handle each : columns) {
      const auto column = nanobind::cast<nanobind::tuple>(each);
      if (column.size() != 3) throw std::invalid_argument("ColumnBlock: a column is (values, texts, splits)");
      columns_.push_back(read(tensors, column));
      if (columns_.back().rows() != rows)
        throw std::invalid_argument("ColumnBlock: a column has another number of rows");
      kept_.push_back(column);
    }
  }

  // Takes the columns of a parser, which need not pass through Python.
  ColumnBlock(std::size_t rows, std::vector<ParsedColumn>&& parsed)
      : rows_(rows), parsed_(std::move(parsed)) {
    columns_.reserve(parsed_.size());
    for (const ParsedColumn& column : parsed_) {
      SourceColumn view;
      view.type = column.type;
      view.splits = column.splits;
      view.ints = column.ints;
      view.floats = column.floats;
      view.bytes = std::as_bytes(std::span(column.bytes));
      view.inner = column.inner;
      settle_column(view);
      columns_.push_back(view);
    }
  }

  // Keeps what was found about each row, under a key that is known by its identity. With the GIL, and before
  // another thread has the block.
  void mark(nanobind::object key, std::vector<std::uint8_t>&& found) {
    if (found.size() != rows_) throw std::invalid_argument("ColumnBlock: give a mark for each row");
    marks_.emplace_back(std::move(key), std::move(found));
  }
  // What was kept under a key; nothing if nothing was. With the GIL.
  const std::vector<std::uint8_t>* marks(nanobind::handle key) const {
    for (const auto& [its_key, found] : marks_)
      if (its_key.is(key)) return &found;
    return nullptr;
  }

  std::size_t rows() const { return rows_; }
  const std::vector<SourceColumn>& columns() const { return columns_; }

  std::vector<ColumnType> types() const {
    std::vector<ColumnType> found;
    for (const SourceColumn& column : columns_) found.push_back(column.type);
    return found;
  }
  std::size_t bytes() const {
    std::size_t found = 0;
    for (const SourceColumn& column : columns_)
      found += column.splits.size_bytes() + column.ints.size_bytes() + column.floats.size_bytes() +
               column.bytes.size_bytes() + column.inner.size_bytes();
    return found;
  }

 private:
  template <class T>
  static std::span<const T> need(const TensorReader& tensors, nanobind::handle tensor) {
    const auto found = tensors.read<T>(tensor);
    if (!found) throw std::invalid_argument("ColumnBlock: columns are plain tensors on the CPU");
    return *found;
  }

  static SourceColumn read(const TensorReader& tensors, const nanobind::tuple& column) {
    const nanobind::handle values = column[0], texts = column[1];
    SourceColumn view;
    view.splits = need<std::int64_t>(tensors, column[2]);
    if (!texts.is_none()) {
      view.type = ColumnType::kBytes;
      view.bytes = need<std::byte>(tensors, values);
      view.inner = need<std::int64_t>(tensors, texts);
    } else if (tensors.holds<float>(values)) {
      view.type = ColumnType::kFloat;
      view.floats = need<float>(tensors, values);
    } else {
      view.ints = need<std::int64_t>(tensors, values);
    }
    settle_column(view);
    return view;
  }

  std::size_t rows_;
  std::vector<SourceColumn> columns_;
  // What the columns are views of: tensors, or the columns of a parser.
  std::vector<nanobind::object> kept_;
  std::vector<ParsedColumn> parsed_;
  std::vector<std::pair<nanobind::object, std::vector<std::uint8_t>>> marks_;
};

// Rows of blocks of the same columns, checked.
class RowPlaces {
 public:
  RowPlaces(const nanobind::tuple& blocks, const std::optional<Column<std::int32_t>>& block_of,
            const Column<std::int64_t>& rows)
      : which_(block_of ? as_span(*block_of) : std::span<const std::int32_t>()), rows_(as_span(rows)) {
    for (const nanobind::handle one : blocks) blocks_.push_back(&nanobind::cast<const ColumnBlock&>(one));
    if (blocks_.empty() || (!block_of && blocks_.size() > 1))
      throw std::invalid_argument("rows: give a block, or several and the block of each row");
    if (block_of && which_.size() != rows_.size())
      throw std::invalid_argument("rows: there must be a block for each row");
  }

  // Without the GIL.
  void check() const {
    bool fine = true;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const auto block = static_cast<std::size_t>(which_.empty() ? 0 : which_[i]);
      fine = fine && block < blocks_.size() && static_cast<std::size_t>(rows_[i]) < blocks_[block]->rows();
    }
    if (!fine) throw std::invalid_argument("rows: a place is beyond its block");
  }

  std::size_t columns() const { return blocks_[0]->columns().size(); }
  std::vector<const SourceColumn*> column(std::size_t number) const {
    std::vector<const SourceColumn*> found;
    for (const ColumnBlock* const block : blocks_) {
      if (block->columns().size() != columns() || number >= columns() ||
          block->columns()[number].type != blocks_[0]->columns()[number].type)
        throw std::invalid_argument("rows: blocks have different columns, or no such column");
      found.push_back(&block->columns()[number]);
    }
    return found;
  }
  const std::vector<const ColumnBlock*>& blocks() const { return blocks_; }
  std::span<const std::int32_t> which() const { return which_; }
  std::span<const std::int64_t> rows() const { return rows_; }

 private:
  std::vector<const ColumnBlock*> blocks_;
  const std::span<const std::int32_t> which_;
  const std::span<const std::int64_t> rows_;
};

// Parses a record from each text, in one part or, with workers, in several. `odd` is what Python is told of:
// each begins at the number of its text.
template <class Parser, class Parsed, class Odd>
std::vector<Parsed> parse_texts(const Parser& parser, const nanobind::list& given, Workers* workers,
                                std::vector<Odd> Parsed::* odd) {
  constexpr std::size_t kTaskTexts = 256;  // fewer are read sooner than another thread wakes up
  std::vector<std::string_view> texts;
  texts.reserve(given.size());
  for (const nanobind::handle one : given) {
    const auto bytes = nanobind::cast<nanobind::bytes>(one);  // the list keeps it
    texts.emplace_back(bytes.c_str(), bytes.size());
  }
  GilReleased unlocked;
  const std::size_t threads = workers == nullptr ? 1 : static_cast<std::size_t>(workers->threads());
  const std::size_t grain = std::max((texts.size() + threads - 1) / threads, kTaskTexts);
  std::vector<Parsed> parsed(std::max<std::size_t>((texts.size() + grain - 1) / grain, 1));
  if (texts.empty()) parsed[0] = parser.parse_texts({});  // columns without rows
  spread_out(workers, texts.size(), grain, [&](std::size_t begin, std::size_t end) {
    Parsed& part = parsed[begin / grain];
    part = parser.parse_texts(std::span(texts).subspan(begin, end - begin));
    for (Odd& one : part.*odd) one.begin += begin;
  });
  return parsed;
}

}  // namespace monolith
