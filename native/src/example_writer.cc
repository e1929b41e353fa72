#include "example_writer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "proto_writer.h"

namespace monolith {
namespace {

constexpr std::size_t kMaxMessage = std::numeric_limits<std::int32_t>::max();  // as protobuf has it

// The values of one row.
struct Row {
  const ColumnView* column;
  std::size_t begin, end;

  bool empty() const { return begin == end; }
  std::size_t size() const { return end - begin; }
  std::span<const std::byte> string(std::size_t i) const {
    const auto from = static_cast<std::size_t>(column->inner[i]);
    return std::as_bytes(column->bytes.subspan(from, static_cast<std::size_t>(column->inner[i + 1]) - from));
  }
};

Row row_of(const ColumnView& column, std::size_t record) {
  const std::size_t row = column.shared ? 0 : record;
  return {&column, static_cast<std::size_t>(column.splits[row]),
          static_cast<std::size_t>(column.splits[row + 1])};
}

// Values as field `field` of a message: packed where they are numbers.
enum class Form : std::uint8_t { kFixed64, kVarint, kFloat, kStrings };

std::size_t packed_size(const Row& row, Form form) {
  if (form == Form::kFixed64) return row.size() * 8;
  if (form == Form::kFloat) return row.size() * 4;
  std::size_t size = 0;
  for (std::size_t i = row.begin; i < row.end; ++i)
    size += varint_size(static_cast<std::uint64_t>(row.column->ints[i]));
  return size;
}

std::size_t values_size(const Row& row, Form form, std::uint32_t field) {
  if (row.empty()) return 0;
  if (form != Form::kStrings) return bytes_field(field, packed_size(row, form));
  std::size_t size = 0;
  for (std::size_t i = row.begin; i < row.end; ++i) size += bytes_field(field, row.string(i).size());
  return size;
}

std::byte* put_bytes(std::byte* at, const void* from, std::size_t size) {
  if (size > 0) std::memcpy(at, from, size);
  return at + size;
}

std::byte* put_values(std::byte* at, const Row& row, Form form, std::uint32_t field) {
  if (row.empty()) return at;
  if (form == Form::kStrings) {
    for (std::size_t i = row.begin; i < row.end; ++i) {
      const auto string = row.string(i);
      at = put_bytes(put_bytes_header(at, field, string.size()), string.data(), string.size());
    }
    return at;
  }
  at = put_bytes_header(at, field, packed_size(row, form));
  if (form == Form::kFixed64) return put_bytes(at, row.column->ints.data() + row.begin, row.size() * 8);
  if (form == Form::kFloat) return put_bytes(at, row.column->floats.data() + row.begin, row.size() * 4);
  for (std::size_t i = row.begin; i < row.end; ++i)
    at = put_varint(at, static_cast<std::uint64_t>(row.column->ints[i]));
  return at;
}

Form form_of(const ColumnView& column, bool tells_ids) {
  switch (column.type) {
    case ColumnType::kInt64:
      return tells_ids && column.ids ? Form::kFixed64 : Form::kVarint;
    case ColumnType::kFloat:
      return Form::kFloat;
    case ColumnType::kBytes:
      break;
  }
  return Form::kStrings;
}

// A Feature with one list: the list's field in the Feature, and how its values are written.
struct ListField {
  std::uint32_t field;
  Form form;
};

ListField list_field(ExampleKind kind, const ColumnView& column) {
  const Form form = form_of(column, kind != ExampleKind::kTfExample);
  if (kind == ExampleKind::kTfExample) {
    using F = fields::TfExample;
    return {form == Form::kStrings ? F::kBytes : form == Form::kFloat ? F::kFloats : F::kInts, form};
  }
  if (kind == ExampleKind::kInstance) {
    using F = fields::InstanceFeature;
    return {form == Form::kFixed64  ? F::kFid
            : form == Form::kFloat  ? F::kFloat
            : form == Form::kVarint ? F::kInt64
                                    : F::kBytes,
            form};
  }
  using F = fields::Feature;
  return {form == Form::kFixed64  ? F::kFidV2List
          : form == Form::kFloat  ? F::kFloatList
          : form == Form::kVarint ? F::kInt64List
                                  : F::kBytesList,
          form};
}

std::size_t feature_size(const Row& row, ListField list) {
  return row.empty() ? 0 : bytes_field(list.field, values_size(row, list.form, 1));
}

std::byte* put_feature(std::byte* at, const Row& row, ListField list) {
  if (row.empty()) return at;
  at = put_bytes_header(at, list.field, values_size(row, list.form, 1));
  return put_values(at, row, list.form, 1);
}

// One column of LineId.
struct LineIdColumn {
  const LineIdField* field;
  const ColumnView* column;
};

std::size_t number_size(LineIdField::Form form, std::int64_t value) {
  return form == LineIdField::kFixed ? 8 : varint_size(static_cast<std::uint64_t>(value));
}

std::size_t line_id_size(std::span<const LineIdColumn> columns, std::size_t record) {
  std::size_t size = 0;
  for (const auto& [field, column] : columns) {
    const Row row = row_of(*column, record);
    if (row.empty()) continue;
    if (field->packed || field->form == LineIdField::kText) {
      size += values_size(row, field->packed ? Form::kVarint : Form::kStrings, field->number);
    } else if (field->form == LineIdField::kNumber) {
      size += row.size() * (key_size(field->number) + 4);
    } else {
      for (std::size_t i = row.begin; i < row.end; ++i)
        size += key_size(field->number) + number_size(field->form, column->ints[i]);
    }
  }
  return size;
}

std::byte* put_line_id(std::byte* at, std::span<const LineIdColumn> columns, std::size_t record) {
  for (const auto& [field, column] : columns) {
    const Row row = row_of(*column, record);
    if (row.empty()) continue;
    if (field->packed || field->form == LineIdField::kText) {
      at = put_values(at, row, field->packed ? Form::kVarint : Form::kStrings, field->number);
      continue;
    }
    for (std::size_t i = row.begin; i < row.end; ++i) {
      if (field->form == LineIdField::kNumber) {
        at = put_bytes(put_key(at, field->number, kFixed32), &column->floats[i], 4);
      } else if (field->form == LineIdField::kFixed) {
        at = put_bytes(put_key(at, field->number, kFixed64), &column->ints[i], 8);
      } else {
        at = put_varint(put_key(at, field->number, kVarint), static_cast<std::uint64_t>(column->ints[i]));
      }
    }
  }
  return at;
}

// The columns of one call, sorted by where they go.
struct Sorted {
  struct Feature {
    const ColumnView* column;
    ListField list;
  };
  std::vector<Feature> features;
  std::vector<LineIdColumn> line_id;
  const ColumnView* label = nullptr;
  const ColumnView* weight = nullptr;
  const ColumnView* source = nullptr;
  const ColumnView* value = nullptr;  // of an Instance
};

void refuse(const ColumnView& column, const std::string& why) {
  throw std::invalid_argument("column '" + column.name + "' cannot be written: " + why);
}

void check_splits(const ColumnView& column, std::span<const std::int64_t> splits, std::size_t rows,
                  std::size_t values, const char* what) {
  if (splits.size() != rows + 1 || splits.front() != 0 ||
      splits.back() != static_cast<std::int64_t>(values) || !std::is_sorted(splits.begin(), splits.end()))
    refuse(column, std::string("its ") + what + " must rise from 0 to the number of values");
}

void check(const ColumnView& column, std::size_t records) {
  const std::size_t rows = column.shared ? 1 : records;
  const std::size_t values = column.type == ColumnType::kInt64   ? column.ints.size()
                             : column.type == ColumnType::kFloat ? column.floats.size()
                             : column.inner.empty()              ? 0
                                                                 : column.inner.size() - 1;
  check_splits(column, column.splits, rows, values, "row splits");
  if (column.type == ColumnType::kBytes)
    check_splits(column, column.inner, values, column.bytes.size(), "string splits");
}

void expect(const ColumnView& column, ColumnType type, const char* what) {
  if (column.type != type) refuse(column, std::string("the message holds ") + what + " there");
}

// Of a field that has one value, at most one may be given.
void expect_single(const ColumnView& column) {
  for (std::size_t i = 0; i + 1 < column.splits.size(); ++i)
    if (column.splits[i + 1] - column.splits[i] > 1)
      refuse(column, "the message holds one value there, and record " + std::to_string(i) + " has " +
                         std::to_string(column.splits[i + 1] - column.splits[i]));
}

void expect_range(const ColumnView& column, std::int64_t least, std::int64_t most, const char* what) {
  for (const std::int64_t value : column.ints)
    if (value < least || value > most)
      refuse(column, std::string("the message holds ") + what + " there, got " + std::to_string(value));
}

Sorted sort(ExampleKind kind, std::size_t records, std::span<const ColumnView> columns) {
  Sorted sorted;
  for (const ColumnView& column : columns) {
    check(column, records);
    const bool plain = kind == ExampleKind::kTfExample;
    if (!plain && column.name == kLabelColumn) {
      expect(column, ColumnType::kFloat, "floats");
      sorted.label = &column;
    } else if (!plain && column.name == kWeightColumn) {
      expect(column, ColumnType::kFloat, "a float");
      expect_single(column);
      sorted.weight = &column;
    } else if (!plain && column.name == kSourceColumn) {
      expect(column, ColumnType::kInt64, "an integer");
      expect_single(column);
      expect_range(column, 0, std::numeric_limits<std::uint32_t>::max(), "32 bits without sign");
      sorted.source = &column;
    } else if (kind == ExampleKind::kInstance && column.name == kValueColumn) {
      expect(column, ColumnType::kFloat, "floats");
      sorted.value = &column;
    } else if (!plain && column.name.starts_with(kLineIdPrefix)) {
      const auto field = std::ranges::find(kLineIdFields, column.name, &LineIdField::column);
      if (field == kLineIdFields.end()) refuse(column, "LineId has no such field");
      expect(column, type_of(field->form), "another type");
      if (!field->repeats) expect_single(column);
      if (field->form == LineIdField::kInteger32)
        expect_range(column, std::numeric_limits<std::int32_t>::min(),
                     std::numeric_limits<std::int32_t>::max(), "32 bits");
      if (field->form == LineIdField::kTruth) expect_range(column, 0, 1, "0 or 1");
      sorted.line_id.push_back({field, &column});
    } else {
      if (!plain && (column.name == kLabelFeature || column.name == kLineIdFeature))
        refuse(column, "the message gives that name a meaning of its own");
      sorted.features.push_back({&column, list_field(kind, column)});
    }
  }
  std::ranges::sort(sorted.line_id, {}, [](const LineIdColumn& one) { return one.field->number; });
  return sorted;
}

std::size_t float_field(const ColumnView* column, std::size_t record, std::uint32_t field) {
  return column == nullptr || row_of(*column, record).empty() ? 0 : key_size(field) + 4;
}

std::byte* put_float_field(std::byte* at, const ColumnView* column, std::size_t record, std::uint32_t field) {
  if (column == nullptr) return at;
  const Row row = row_of(*column, record);
  return row.empty() ? at : put_bytes(put_key(at, field, kFixed32), &column->floats[row.begin], 4);
}

std::size_t varint_field(const ColumnView* column, std::size_t record, std::uint32_t field) {
  if (column == nullptr) return 0;
  const Row row = row_of(*column, record);
  return row.empty() ? 0 : key_size(field) + varint_size(static_cast<std::uint64_t>(column->ints[row.begin]));
}

std::byte* put_varint_field(std::byte* at, const ColumnView* column, std::size_t record,
                            std::uint32_t field) {
  if (column == nullptr) return at;
  const Row row = row_of(*column, record);
  return row.empty()
             ? at
             : put_varint(put_key(at, field, kVarint), static_cast<std::uint64_t>(column->ints[row.begin]));
}

std::size_t floats_field(const ColumnView* column, std::size_t record, std::uint32_t field) {
  return column == nullptr ? 0 : values_size(row_of(*column, record), Form::kFloat, field);
}

std::byte* put_floats_field(std::byte* at, const ColumnView* column, std::size_t record,
                            std::uint32_t field) {
  return column == nullptr ? at : put_values(at, row_of(*column, record), Form::kFloat, field);
}

// The messages of one record each: how many bytes they take, and those bytes.
class RowWriter {
 public:
  RowWriter(ExampleKind kind, Sorted sorted) : kind_(kind), sorted_(std::move(sorted)) {}

  std::size_t size(std::size_t record) const {
    const std::size_t features = features_size(record);
    if (kind_ == ExampleKind::kTfExample) return bytes_field(fields::TfExample::kFeatures, features);
    const std::size_t line_id = line_id_size(sorted_.line_id, record);
    if (kind_ == ExampleKind::kExample) {
      using F = fields::Example;
      return features + (line_id > 0 ? bytes_field(F::kLineId, line_id) : 0) +
             floats_field(sorted_.label, record, F::kLabel) +
             float_field(sorted_.weight, record, F::kWeight) +
             varint_field(sorted_.source, record, F::kSource);
    }
    using F = fields::Instance;
    return features + (line_id > 0 ? bytes_field(F::kLineId, line_id) : 0) +
           floats_field(sorted_.value, record, F::kValue) + floats_field(sorted_.label, record, F::kLabel) +
           float_field(sorted_.weight, record, F::kWeight) + varint_field(sorted_.source, record, F::kSource);
  }

  std::byte* put(std::byte* at, std::size_t record) const {
    if (kind_ == ExampleKind::kTfExample) {
      at = put_bytes_header(at, fields::TfExample::kFeatures, features_size(record));
      return put_features(at, record);
    }
    const std::size_t line_id = line_id_size(sorted_.line_id, record);
    const auto put_id = [&](std::uint32_t field) {
      if (line_id == 0) return;
      at = put_bytes_header(at, field, line_id);
      at = put_line_id(at, sorted_.line_id, record);
    };
    if (kind_ == ExampleKind::kExample) {
      using F = fields::Example;
      at = put_features(at, record);
      put_id(F::kLineId);
      at = put_floats_field(at, sorted_.label, record, F::kLabel);
      at = put_float_field(at, sorted_.weight, record, F::kWeight);
      return put_varint_field(at, sorted_.source, record, F::kSource);
    }
    using F = fields::Instance;
    at = put_floats_field(at, sorted_.value, record, F::kValue);
    at = put_floats_field(at, sorted_.label, record, F::kLabel);
    at = put_float_field(at, sorted_.weight, record, F::kWeight);
    put_id(F::kLineId);
    at = put_features(at, record);
    return put_varint_field(at, sorted_.source, record, F::kSource);
  }

 private:
  // An Instance's features hold their values themselves; other features hold a Feature next to the name.
  std::size_t entry_size(const Sorted::Feature& feature, const Row& row) const {
    const std::size_t name = bytes_field(fields::Entry::kName, feature.column->name.size());
    if (kind_ == ExampleKind::kInstance)
      return name + values_size(row, feature.list.form, feature.list.field);
    return name + bytes_field(fields::Entry::kFeature, feature_size(row, feature.list));
  }
  std::uint32_t entry_field() const {
    return kind_ == ExampleKind::kInstance    ? fields::Instance::kFeature
           : kind_ == ExampleKind::kTfExample ? fields::TfExample::kEntry
                                              : fields::Example::kNamedFeature;
  }
  std::size_t features_size(std::size_t record) const {
    std::size_t size = 0;
    for (const auto& feature : sorted_.features) {
      const Row row = row_of(*feature.column, record);
      if (!row.empty()) size += bytes_field(entry_field(), entry_size(feature, row));
    }
    return size;
  }
  std::byte* put_features(std::byte* at, std::size_t record) const {
    for (const auto& feature : sorted_.features) {
      const Row row = row_of(*feature.column, record);
      if (row.empty()) continue;
      at = put_bytes_header(at, entry_field(), entry_size(feature, row));
      const std::string& name = feature.column->name;
      at = put_bytes(put_bytes_header(at, fields::Entry::kName, name.size()), name.data(), name.size());
      if (kind_ == ExampleKind::kInstance) {
        at = put_values(at, row, feature.list.form, feature.list.field);
      } else {
        at = put_bytes_header(at, fields::Entry::kFeature, feature_size(row, feature.list));
        at = put_feature(at, row, feature.list);
      }
    }
    return at;
  }

  const ExampleKind kind_;
  const Sorted sorted_;
};

void put_text(std::vector<std::byte>& to, std::uint32_t field, std::string_view text) {
  const std::size_t had = to.size();
  to.resize(had + bytes_field(field, text.size()));
  put_bytes(put_bytes_header(to.data() + had, field, text.size()), text.data(), text.size());
}

void put_number(std::vector<std::byte>& to, std::uint32_t field, std::uint64_t number) {
  const std::size_t had = to.size();
  to.resize(had + key_size(field) + varint_size(number));
  put_varint(put_key(to.data() + had, field, kVarint), number);
}

// Appends a list of `rows` features; `size` and `put` say what each holds.
template <class Size, class Put>
void put_list(std::vector<std::byte>& to, std::string_view name, bool shared, std::size_t rows, Size&& size,
              Put&& put) {
  using F = fields::NamedFeatureList;
  std::vector<std::byte> head, tail;
  put_text(head, F::kName, name);
  if (shared) put_number(tail, F::kType, F::kShared);
  std::size_t total = head.size() + tail.size();
  for (std::size_t row = 0; row < rows; ++row) total += bytes_field(F::kFeature, size(row));
  const std::size_t had = to.size();
  to.resize(had + bytes_field(fields::ExampleBatch::kList, total));
  std::byte* at = put_bytes_header(to.data() + had, fields::ExampleBatch::kList, total);
  at = put_bytes(at, head.data(), head.size());
  for (std::size_t row = 0; row < rows; ++row) at = put(put_bytes_header(at, F::kFeature, size(row)), row);
  put_bytes(at, tail.data(), tail.size());
}

void put_column(std::vector<std::byte>& to, std::string_view name, const ColumnView& column, ListField list) {
  if (column.splits.back() == 0) return;
  put_list(
      to, name, column.shared, column.splits.size() - 1,
      [&](std::size_t row) { return feature_size(row_of(column, row), list); },
      [&](std::byte* at, std::size_t row) { return put_feature(at, row_of(column, row), list); });
}

EncodedExamples encode_batch(std::size_t records, const Sorted& sorted) {
  EncodedExamples encoded;
  for (const auto& feature : sorted.features)
    put_column(encoded.data, feature.column->name, *feature.column, feature.list);
  const ListField floats{fields::Feature::kFloatList, Form::kFloat};
  if (sorted.label != nullptr) put_column(encoded.data, kLabelFeature, *sorted.label, floats);
  if (sorted.weight != nullptr) put_column(encoded.data, kWeightColumn, *sorted.weight, floats);
  if (!sorted.line_id.empty()) {
    const bool shared =
        std::ranges::all_of(sorted.line_id, [](const LineIdColumn& one) { return one.column->shared; });
    const auto list_size = [&](std::size_t row) { return bytes_field(1, line_id_size(sorted.line_id, row)); };
    put_list(
        encoded.data, kLineIdFeature, shared, shared ? 1 : records,
        [&](std::size_t row) { return bytes_field(fields::Feature::kBytesList, list_size(row)); },
        [&](std::byte* at, std::size_t row) {
          at = put_bytes_header(at, fields::Feature::kBytesList, list_size(row));
          at = put_bytes_header(at, 1, line_id_size(sorted.line_id, row));
          return put_line_id(at, sorted.line_id, row);
        });
  }
  put_number(encoded.data, fields::ExampleBatch::kBatchSize, records);
  if (sorted.source != nullptr && !sorted.source->ints.empty()) {
    if (!sorted.source->shared &&
        (sorted.source->ints.size() != records ||
         std::ranges::adjacent_find(sorted.source->ints, std::ranges::not_equal_to()) !=
             sorted.source->ints.end()))
      refuse(*sorted.source, "a batch is of one source");
    put_number(encoded.data, fields::ExampleBatch::kSource,
               static_cast<std::uint64_t>(sorted.source->ints[0]));
  }
  if (encoded.data.size() > kMaxMessage)
    throw std::invalid_argument("a batch of these records is longer than a message may be: write fewer");
  encoded.splits = {0, static_cast<std::int64_t>(encoded.data.size())};
  return encoded;
}

void run(Workers* workers, std::size_t tasks, const std::function<void(std::size_t)>& work) {
  if (workers != nullptr) return workers->run(tasks, work);
  for (std::size_t task = 0; task < tasks; ++task) work(task);
}

}  // namespace

EncodedExamples encode_examples(ExampleKind kind, std::size_t records, std::span<const ColumnView> columns,
                                Workers* workers) {
  constexpr std::size_t kGrain = 128;
  Sorted sorted = sort(kind, records, columns);
  if (kind == ExampleKind::kExampleBatch) return encode_batch(records, sorted);
  const RowWriter writer(kind, std::move(sorted));
  EncodedExamples encoded;
  encoded.splits.resize(records + 1);
  const auto each = [&](auto&& body) {
    run(workers, (records + kGrain - 1) / kGrain, [&](std::size_t task) {
      for (std::size_t i = task * kGrain; i < std::min(records, (task + 1) * kGrain); ++i) body(i);
    });
  };
  each([&](std::size_t i) { encoded.splits[i + 1] = static_cast<std::int64_t>(writer.size(i)); });
  for (std::size_t i = 0; i < records; ++i) {
    if (encoded.splits[i + 1] > static_cast<std::int64_t>(kMaxMessage))
      throw std::invalid_argument("record " + std::to_string(i) + " is longer than a message may be");
    encoded.splits[i + 1] += encoded.splits[i];
  }
  encoded.data.resize(static_cast<std::size_t>(encoded.splits.back()));
  each([&](std::size_t i) { writer.put(encoded.data.data() + encoded.splits[i], i); });
  return encoded;
}

}  // namespace monolith
