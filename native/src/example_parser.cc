#include "example_parser.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "fid.h"
#include "proto_reader.h"

namespace monolith {
namespace {

constexpr std::size_t kMaxPayload = std::numeric_limits<std::int32_t>::max();  // as protobuf has it
constexpr std::size_t kMaxCells = std::size_t{1} << 27;
constexpr std::uint64_t kMaxBatch = 1 << 24;

// How values are written; the column type and the wire type follow.
enum class Encoding : std::uint8_t { kFidV1, kFixed64, kInt64, kInt32, kBool, kFloat, kDouble, kBytes };

constexpr ColumnType type_of(Encoding encoding) {
  return encoding == Encoding::kFloat || encoding == Encoding::kDouble ? ColumnType::kFloat
         : encoding == Encoding::kBytes                                ? ColumnType::kBytes
                                                                       : ColumnType::kInt64;
}

constexpr Wire wire_of(Encoding encoding) {
  switch (encoding) {
    case Encoding::kFidV1:
    case Encoding::kFixed64:
    case Encoding::kDouble:
      return kFixed64;
    case Encoding::kFloat:
      return kFixed32;
    case Encoding::kBytes:
      return kBytes;
    default:
      return kVarint;
  }
}

constexpr std::string_view name_of(ColumnType type) {
  return type == ColumnType::kInt64 ? "integers" : type == ColumnType::kFloat ? "floats" : "strings";
}

std::int64_t v1_to_v2(std::uint64_t fid) {
  return make_fid(2, static_cast<std::uint32_t>(fid >> kSignatureBits[0]), fid);
}

std::string_view text(Payload bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Whether Python will take these bytes for a name.
bool is_utf8(std::string_view name) {
  for (std::size_t i = 0; i < name.size();) {
    const auto first = static_cast<std::uint8_t>(name[i]);
    const int more = first < 0x80            ? 0
                     : first >> 5 == 0b110   ? 1
                     : first >> 4 == 0b1110  ? 2
                     : first >> 3 == 0b11110 ? 3
                                             : -1;
    if (more < 0 || name.size() - i <= static_cast<std::size_t>(more)) return false;
    std::uint32_t code = more == 0 ? first : first & (0x3f >> more);
    for (int k = 1; k <= more; ++k) {
      const auto next = static_cast<std::uint8_t>(name[i + k]);
      if (next >> 6 != 0b10) return false;
      code = code << 6 | (next & 0x3f);
    }
    constexpr std::uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (code < kLeast[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
    i += more + 1;
  }
  return true;
}

// Bytes that grow at the end, without filling what is about to be written.
class Heap {
 public:
  std::byte* grow(std::size_t bytes) {
    if (bytes > capacity_ - size_) {
      capacity_ = std::max({size_ + bytes, 2 * capacity_, std::size_t{64}});
      auto larger = std::make_unique_for_overwrite<std::byte[]>(capacity_);
      if (size_ > 0) std::memcpy(larger.get(), data_.get(), size_);
      data_ = std::move(larger);
    }
    size_ += bytes;
    return data_.get() + size_ - bytes;
  }
  void shrink(std::size_t size) { size_ = size; }
  const std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }

 private:
  std::unique_ptr<std::byte[]> data_;
  std::size_t size_ = 0, capacity_ = 0;
};

// A column as it is gathered: the rows that have something, and their values. A row stays open until the next
// one is opened, so that a record found bad, or a feature that comes again, can be taken back.
class Gathered {
 public:
  struct Cell {
    std::uint32_t row, count;
  };
  using Length = std::uint32_t;

  explicit Gathered(std::string_view name) : name(name) {}

  bool is_open(std::uint32_t row) const { return !cells.empty() && cells.back().row == row; }

  // Continues a row, or opens it; true when it was not open.
  bool open(std::uint32_t row) {
    if (is_open(row)) return false;
    before_ = {type, typed, claimed, values.size(), lengths.size()};
    cells.push_back({row, 0});
    return true;
  }
  // Empties the row that is open.
  void reset() {
    type = before_.type, typed = before_.typed, claimed = before_.claimed;
    values.shrink(before_.values), lengths.shrink(before_.lengths);
    cells.back().count = 0;
  }
  // Takes back the row that is open.
  void drop() {
    reset();
    cells.pop_back();
  }

  // Room for values in the row that is open. A row without values says what type it would have, and gives
  // way to one with values.
  std::byte* add(ColumnType of, std::size_t count, std::size_t bytes) {
    if (count == 0) {
      if (!typed) type = of;
      typed = true;
      return nullptr;
    }
    if (claimed && type != of)
      throw BadMessage{"wrong type: column '" + name + "' holds " + std::string(name_of(of)) + " here, and " +
                       std::string(name_of(type)) + " in other records"};
    type = of;
    typed = claimed = true;
    cells.back().count += static_cast<std::uint32_t>(count);
    return values.grow(bytes);
  }
  void add_int(std::int64_t value) { put(add(ColumnType::kInt64, 1, sizeof value), value); }
  void add_float(float value) { put(add(ColumnType::kFloat, 1, sizeof value), value); }
  void add_string(Payload string) {
    std::byte* const to = add(ColumnType::kBytes, 1, string.size());
    if (!string.empty()) std::memcpy(to, string.data(), string.size());
    put(lengths.grow(sizeof(Length)), static_cast<Length>(string.size()));
  }

  const std::string name;
  bool shared = false;
  bool listed = false;  // a list of its batch is for it
  ColumnType type = ColumnType::kInt64;
  bool typed = false;    // it has a type
  bool claimed = false;  // there are values of it
  std::vector<Cell> cells;
  Heap values, lengths;  // lengths: of strings

 private:
  template <class T>
  static void put(std::byte* to, T value) {
    std::memcpy(to, &value, sizeof value);
  }

  struct State {
    ColumnType type = ColumnType::kInt64;
    bool typed = false, claimed = false;
    std::size_t values = 0, lengths = 0;
  };
  State before_;  // the row that is open
};

// Reads the current field's values, packed or not, into a column whose row is open.
void read_values(ProtoReader& reader, Gathered& column, Encoding encoding) {
  const auto packed = [&](std::size_t size) {
    const Payload bytes = reader.bytes();
    if (bytes.size() % size != 0) throw BadMessage{"malformed message: packed values end inside a value"};
    return bytes;
  };
  if (encoding == Encoding::kBytes) {
    if (reader.wire() == kBytes)
      column.add_string(reader.bytes());
    else
      reader.skip();
    return;
  }
  if (reader.wire() != kBytes && reader.wire() != wire_of(encoding)) return reader.skip();
  const bool one = reader.wire() != kBytes;
  switch (encoding) {
    case Encoding::kFidV1: {
      if (one) return column.add_int(v1_to_v2(reader.fixed64()));
      ProtoReader values(packed(8));
      while (!values.at_end()) column.add_int(v1_to_v2(values.fixed64()));
      return;
    }
    case Encoding::kFixed64: {
      if (one) return column.add_int(static_cast<std::int64_t>(reader.fixed64()));
      const Payload bytes = packed(8);
      std::byte* const to = column.add(ColumnType::kInt64, bytes.size() / 8, bytes.size());
      if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
      return;
    }
    case Encoding::kFloat: {
      if (one) return column.add_float(reader.float32());
      const Payload bytes = packed(4);
      std::byte* const to = column.add(ColumnType::kFloat, bytes.size() / 4, bytes.size());
      if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
      return;
    }
    case Encoding::kDouble: {
      if (one) return column.add_float(static_cast<float>(reader.float64()));
      ProtoReader values(packed(8));
      while (!values.at_end()) column.add_float(static_cast<float>(values.float64()));
      return;
    }
    default: {
      const auto number = [encoding](std::uint64_t bits) -> std::int64_t {
        if (encoding == Encoding::kInt32) return static_cast<std::int32_t>(bits);
        return encoding == Encoding::kBool ? bits != 0 : static_cast<std::int64_t>(bits);
      };
      if (one) return column.add_int(number(reader.varint()));
      ProtoReader values(reader.bytes());
      while (!values.at_end()) column.add_int(number(values.varint()));
    }
  }
}

// Reads a message of a single field, `value`, that repeats.
void read_list(Payload list, Gathered& column, Encoding encoding) {
  for (ProtoReader reader(list); reader.next();) {
    if (reader.field() == 1)
      read_values(reader, column, encoding);
    else
      reader.skip();
  }
  column.add(type_of(encoding), 0, 0);
}

// Reads a message of a single field, `list`, that repeats.
void read_lists(Payload lists, Gathered& column, Encoding encoding) {
  for (ProtoReader reader(lists); reader.next();) {
    if (reader.is(1, kBytes))
      read_list(reader.bytes(), column, encoding);
    else
      reader.skip();
  }
  column.add(type_of(encoding), 0, 0);
}

// One member of a Feature's oneof.
struct Member {
  enum Shape : std::uint8_t { kNone, kScalar, kList, kLists };
  Shape shape = kNone;
  Encoding encoding = Encoding::kInt64;

  bool fits(const ProtoReader& reader) const {
    return shape != kNone && reader.wire() == (shape == kScalar ? wire_of(encoding) : kBytes);
  }
};

Member tf_member(std::uint64_t field) {
  using F = fields::TfExample;
  switch (field) {
    case F::kBytes:
      return {Member::kList, Encoding::kBytes};
    case F::kFloats:
      return {Member::kList, Encoding::kFloat};
    case F::kInts:
      return {Member::kList, Encoding::kInt64};
    default:
      return {};
  }
}

Member feature_member(std::uint64_t field) {
  using F = fields::Feature;
  switch (field) {
    case F::kFidV1List:
      return {Member::kList, Encoding::kFidV1};
    case F::kFidV2List:
      return {Member::kList, Encoding::kFixed64};
    case F::kFloatList:
      return {Member::kList, Encoding::kFloat};
    case F::kDoubleList:
      return {Member::kList, Encoding::kDouble};
    case F::kInt64List:
      return {Member::kList, Encoding::kInt64};
    case F::kBytesList:
      return {Member::kList, Encoding::kBytes};
    case F::kFidV1Lists:
      return {Member::kLists, Encoding::kFidV1};
    case F::kFidV2Lists:
      return {Member::kLists, Encoding::kFixed64};
    case F::kFloatLists:
      return {Member::kLists, Encoding::kFloat};
    case F::kDoubleLists:
      return {Member::kLists, Encoding::kDouble};
    case F::kInt64Lists:
      return {Member::kLists, Encoding::kInt64};
    case F::kBytesLists:
      return {Member::kLists, Encoding::kBytes};
    case F::kInt64Value:
      return {Member::kScalar, Encoding::kInt64};
    case F::kFloatValue:
      return {Member::kScalar, Encoding::kFloat};
    case F::kDoubleValue:
      return {Member::kScalar, Encoding::kDouble};
    case F::kBytesValue:
      return {Member::kScalar, Encoding::kBytes};
    default:
      return {};
  }
}

Encoding line_id_encoding(LineIdField::Form form) {
  switch (form) {
    case LineIdField::kFixed:
      return Encoding::kFixed64;
    case LineIdField::kInteger64:
      return Encoding::kInt64;
    case LineIdField::kInteger32:
      return Encoding::kInt32;
    case LineIdField::kTruth:
      return Encoding::kBool;
    case LineIdField::kNumber:
      return Encoding::kFloat;
    case LineIdField::kText:
      break;
  }
  return Encoding::kBytes;
}

using Wanted = std::optional<std::unordered_set<std::string>>;

// So that a name is found without making a string of it.
struct NameHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view name) const { return std::hash<std::string_view>()(name); }
};
template <class T>
using ByName = std::unordered_map<std::string, T, NameHash, std::equal_to<>>;

using Types = ByName<ColumnType>;

// Gathers the columns of a stretch of records. Rows count the records that were kept.
class Gatherer {
 public:
  Gatherer(ExampleKind kind, const Wanted& wanted, const Types* types)
      : kind_(kind), wanted_(wanted), types_(types), slots_(kind == ExampleKind::kInstance ? 1024 : 0) {}

  // Reads one record; throws BadMessage, and is then as it was before.
  void record(Payload payload) {
    if (payload.size() > kMaxPayload) throw BadMessage{"malformed message: longer than 2 GiB"};
    last_ = nullptr;
    touched_.clear();
    try {
      switch (kind_) {
        case ExampleKind::kTfExample:
          tf_example(payload);
          break;
        case ExampleKind::kExample:
          example(payload);
          break;
        default:
          instance(payload);
      }
    } catch (...) {
      for (Gathered* column : touched_) column->drop();
      throw;
    }
    ++row_;
  }

  // Reads a whole batch into a Gatherer that has nothing yet.
  void batch(Payload payload) {
    using F = fields::ExampleBatch;
    if (payload.size() > kMaxPayload) throw BadMessage{"malformed message: longer than 2 GiB"};
    std::vector<Payload> lists;
    std::uint64_t size = 0;
    std::optional<std::uint32_t> source;
    for (ProtoReader reader(payload); reader.next();) {
      if (reader.is(F::kList, kBytes))
        lists.push_back(reader.bytes());
      else if (reader.is(F::kBatchSize, kVarint))
        size = reader.varint();
      else if (reader.is(F::kSource, kVarint))
        source = static_cast<std::uint32_t>(reader.varint());
      else
        reader.skip();
    }
    if (size > kMaxBatch) throw BadMessage{"malformed batch: batch_size is negative, or above 16777216"};
    for (const Payload list : lists) batch_list(list, size);
    if (source) {
      row_ = 0;
      if (Gathered* const column = lifted(source_, kSourceColumn)) {
        list_for(column, true);
        open(*column);
        column->add_int(*source);
      }
    }
    row_ = static_cast<std::uint32_t>(size);
  }

  std::size_t rows() const { return row_; }
  const std::deque<Gathered>& columns() const { return columns_; }

 private:
  // A column that is found by its place in a table, once its name was looked up.
  struct Known {
    bool looked_up = false;
    Gathered* column = nullptr;  // null: not wanted
  };

  // The name of a feature. Records mostly have the same features in the same order, so each name remembers
  // which one came after it.
  struct Name {
    std::string name;
    Gathered* column = nullptr;  // null: not wanted, or LineId
    bool line_id = false;
    Name* next = nullptr;
  };

  Gathered* column(std::string_view name) {
    const std::string key(name);
    if (wanted_ && !wanted_->contains(key)) return nullptr;
    const auto [found, is_new] = by_column_.try_emplace(key, nullptr);
    if (is_new) {
      Gathered& made = columns_.emplace_back(name);
      found->second = &made;
      if (types_ != nullptr) {
        if (const auto type = types_->find(key); type != types_->end()) {
          made.type = type->second;
          made.typed = made.claimed = true;
        }
      }
    }
    return found->second;
  }

  Gathered* lifted(Known& known, std::string_view name) {
    if (!known.looked_up) known = {true, column(name)};
    return known.column;
  }

  Name& name(Payload bytes) {
    const std::string_view wanted = text(bytes);
    Name*& guess = last_ == nullptr ? first_ : last_->next;
    if (guess == nullptr || guess->name != wanted) {
      auto found = by_name_.find(wanted);
      if (found == by_name_.end()) {
        if (!is_utf8(wanted)) throw BadMessage{"malformed message: a name that is not UTF-8"};
        Name& made = names_.emplace_back(std::string(wanted));
        if (kind_ != ExampleKind::kTfExample && wanted == kLineIdFeature)
          made.line_id = true;
        else
          made.column =
              column(kind_ != ExampleKind::kTfExample && wanted == kLabelFeature ? kLabelColumn : wanted);
        found = by_name_.emplace(wanted, &made).first;
      }
      guess = found->second;
    }
    last_ = guess;
    return *guess;
  }

  void open(Gathered& column) {
    // Of a batch nothing is taken back: it is good or bad as a whole.
    if (column.open(row_) && kind_ != ExampleKind::kExampleBatch) touched_.push_back(&column);
  }

  // Reads a field whose last value counts.
  void scalar(ProtoReader& reader, Gathered* column, Encoding encoding) {
    if (column == nullptr || reader.wire() != wire_of(encoding)) return reader.skip();
    open(*column);
    column->reset();
    read_values(reader, *column, encoding);
  }

  // Reads a field that repeats.
  void repeated(ProtoReader& reader, Gathered* column, Encoding encoding) {
    if (column == nullptr) return reader.skip();
    if (reader.wire() != kBytes && reader.wire() != wire_of(encoding)) return reader.skip();
    open(*column);
    read_values(reader, *column, encoding);
    column->add(type_of(encoding), 0, 0);
  }

  // Reads one Feature behind those that went into the same row; `member` is the field the oneof holds.
  template <Member (&kMember)(std::uint64_t)>
  void feature(Payload feature, Gathered& column, std::uint64_t& member) {
    for (ProtoReader reader(feature); reader.next();) {
      const Member found = kMember(reader.field());
      if (!found.fits(reader)) {
        reader.skip();
        continue;
      }
      open(column);
      if (member != reader.field() || found.shape == Member::kScalar) column.reset();
      member = reader.field();
      if (found.shape == Member::kScalar)
        read_values(reader, column, found.encoding);
      else if (found.shape == Member::kList)
        read_list(reader.bytes(), column, found.encoding);
      else
        read_lists(reader.bytes(), column, found.encoding);
    }
  }

  // Reads a name and a Feature: an entry of a map, or a NamedFeature.
  template <Member (&kMember)(std::uint64_t)>
  void entry(Payload entry) {
    using F = fields::Entry;
    Payload name_bytes, value;
    int values = 0;
    for (ProtoReader reader(entry); reader.next();) {
      if (reader.is(F::kName, kBytes)) {
        name_bytes = reader.bytes();
      } else if (reader.is(F::kFeature, kBytes)) {
        value = reader.bytes();
        ++values;
      } else {
        reader.skip();
      }
    }
    const Name& found = name(name_bytes);
    if (found.line_id) return line_id_feature(value);
    if (found.column == nullptr) return;
    if (found.column->is_open(row_)) found.column->reset();
    std::uint64_t member = 0;
    if (values == 1) return feature<kMember>(value, *found.column, member);
    // A message field that comes more than once is one message, in pieces.
    for (ProtoReader reader(entry); reader.next();) {
      if (reader.is(F::kFeature, kBytes))
        feature<kMember>(reader.bytes(), *found.column, member);
      else
        reader.skip();
    }
  }

  // Reads a LineId from the string that a Feature holds.
  void line_id_feature(Payload feature) {
    std::optional<Payload> bytes;
    for (ProtoReader reader(feature); reader.next();) {
      if (reader.is(fields::Feature::kBytesValue, kBytes)) {
        bytes = reader.bytes();
      } else if (reader.is(fields::Feature::kBytesList, kBytes)) {
        bytes.reset();
        for (ProtoReader list(reader.bytes()); list.next();) {
          if (!bytes && list.is(1, kBytes))
            bytes = list.bytes();
          else
            list.skip();
        }
      } else {
        reader.skip();
      }
    }
    if (bytes) line_id(*bytes);
  }

  void line_id(Payload message) {
    const auto& columns = line_id_columns();
    if (!line_id_wanted_) return;
    for (ProtoReader reader(message); reader.next();) {
      std::size_t i = 0;
      while (i < kLineIdFields.size() && kLineIdFields[i].number != reader.field()) ++i;
      if (i == kLineIdFields.size())
        reader.skip();
      else if (kLineIdFields[i].repeats)
        repeated(reader, columns[i], line_id_encoding(kLineIdFields[i].form));
      else
        scalar(reader, columns[i], line_id_encoding(kLineIdFields[i].form));
    }
  }

  // By place in kLineIdFields; null where not wanted.
  const std::array<Gathered*, kLineIdFields.size()>& line_id_columns() {
    if (!std::exchange(line_id_looked_up_, true)) {
      for (std::size_t i = 0; i < kLineIdFields.size(); ++i) {
        line_id_[i] = column(kLineIdFields[i].column);
        line_id_wanted_ |= line_id_[i] != nullptr;
      }
    }
    return line_id_;
  }

  void tf_example(Payload payload) {
    using F = fields::TfExample;
    for (ProtoReader reader(payload); reader.next();) {
      if (!reader.is(F::kFeatures, kBytes)) {
        reader.skip();
        continue;
      }
      for (ProtoReader features(reader.bytes()); features.next();) {
        if (features.is(F::kEntry, kBytes))
          entry<tf_member>(features.bytes());
        else
          features.skip();
      }
    }
  }

  void example(Payload payload) {
    using F = fields::Example;
    for (ProtoReader reader(payload); reader.next();) {
      if (reader.is(F::kNamedFeature, kBytes))
        entry<feature_member>(reader.bytes());
      else if (reader.is(F::kLineId, kBytes))
        line_id(reader.bytes());
      else if (reader.field() == F::kLabel)
        repeated(reader, lifted(label_, kLabelColumn), Encoding::kFloat);
      else if (reader.field() == F::kWeight)
        scalar(reader, lifted(weight_, kWeightColumn), Encoding::kFloat);
      else if (reader.field() == F::kSource)
        scalar(reader, lifted(source_, kSourceColumn), Encoding::kInt64);
      else
        reader.skip();
    }
  }

  void instance(Payload payload) {
    using F = fields::Instance;
    for (ProtoReader reader(payload); reader.next();) {
      if (reader.is(F::kFid, kBytes)) {
        const Payload packed = reader.bytes();
        if (packed.size() % 8 != 0) throw BadMessage{"malformed message: packed values end inside a value"};
        for (ProtoReader fids(packed); !fids.at_end();) slot_fid(fids.fixed64());
      } else if (reader.is(F::kFid, kFixed64)) {
        slot_fid(reader.fixed64());
      } else if (reader.is(F::kLineId, kBytes)) {
        line_id(reader.bytes());
      } else if (reader.is(F::kFeature, kBytes)) {
        instance_feature(reader.bytes());
      } else if (reader.field() == F::kValue) {
        repeated(reader, lifted(value_, kValueColumn), Encoding::kFloat);
      } else if (reader.field() == F::kLabel) {
        repeated(reader, lifted(label_, kLabelColumn), Encoding::kFloat);
      } else if (reader.field() == F::kWeight) {
        scalar(reader, lifted(weight_, kWeightColumn), Encoding::kFloat);
      } else if (reader.field() == F::kSource) {
        scalar(reader, lifted(source_, kSourceColumn), Encoding::kInt64);
      } else {
        reader.skip();
      }
    }
  }

  void slot_fid(std::uint64_t fid) {
    const std::size_t slot = fid >> kSignatureBits[0];
    Known& known = slots_[slot];
    if (!known.looked_up) known = {true, column(std::string(kSlotPrefix) + std::to_string(slot))};
    if (known.column == nullptr) return;
    open(*known.column);
    known.column->add_int(v1_to_v2(fid));
  }

  void instance_feature(Payload message) {
    using F = fields::InstanceFeature;
    Payload name_bytes;
    for (ProtoReader reader(message); reader.next();) {
      if (reader.is(F::kName, kBytes))
        name_bytes = reader.bytes();
      else
        reader.skip();
    }
    Gathered* const column = name(name_bytes).column;
    if (column == nullptr) return;
    if (column->is_open(row_)) column->reset();
    for (ProtoReader reader(message); reader.next();) {
      constexpr Encoding kEncodings[] = {Encoding::kFixed64, Encoding::kFloat, Encoding::kInt64,
                                         Encoding::kBytes};
      if (reader.field() >= F::kFid && reader.field() <= F::kBytes) {
        repeated(reader, column, kEncodings[reader.field() - F::kFid]);
      } else if (reader.field() >= F::kFidList && reader.field() <= F::kBytesList &&
                 reader.wire() == kBytes) {
        open(*column);
        read_list(reader.bytes(), *column, kEncodings[reader.field() - F::kFidList]);
      } else {
        reader.skip();
      }
    }
  }

  void batch_list(Payload list, std::uint64_t batch_size) {
    using F = fields::NamedFeatureList;
    Payload name_bytes;
    std::uint64_t features = 0, type = 0;
    for (ProtoReader reader(list); reader.next();) {
      if (reader.is(F::kName, kBytes)) {
        name_bytes = reader.bytes();
      } else if (reader.is(F::kType, kVarint)) {
        type = reader.varint();
      } else {
        features += reader.is(F::kFeature, kBytes);
        reader.skip();
      }
    }
    const Name& found = name(name_bytes);
    const bool shared = type == F::kShared;
    if (shared ? features == 0 : features != batch_size)
      throw BadMessage{"malformed batch: list '" + found.name + "' has " + std::to_string(features) +
                       " features for " + std::to_string(batch_size) + " records"};
    if (found.line_id)
      for (Gathered* const column : line_id_columns()) list_for(column, shared);
    else
      list_for(found.column, shared);
    row_ = 0;
    for (ProtoReader reader(list); reader.next();) {
      if (!reader.is(F::kFeature, kBytes)) {
        reader.skip();
        continue;
      }
      const Payload message = reader.bytes();
      std::uint64_t member = 0;
      if (found.line_id)
        line_id_feature(message);
      else if (found.column != nullptr)
        feature<feature_member>(message, *found.column, member);
      ++row_;
      if (shared) break;  // one stands for all
    }
  }

  // Takes a column of a batch for one list, which must be the only one of that column.
  void list_for(Gathered* column, bool shared) {
    if (column == nullptr) return;
    if (std::exchange(column->listed, true))
      throw BadMessage{"malformed batch: two lists for column '" + column->name + "'"};
    column->shared = shared;
  }

  const ExampleKind kind_;
  const Wanted& wanted_;
  const Types* const types_;  // of the records before these
  std::uint32_t row_ = 0;
  std::deque<Gathered> columns_;
  ByName<Gathered*> by_column_;
  std::deque<Name> names_;  // which does not move them
  ByName<Name*> by_name_;
  Name *first_ = nullptr, *last_ = nullptr;
  std::vector<Gathered*> touched_;  // by the record that is being read
  Known label_, weight_, source_, value_;
  std::vector<Known> slots_;
  std::array<Gathered*, kLineIdFields.size()> line_id_{};
  bool line_id_looked_up_ = false, line_id_wanted_ = false;
};

// A stretch of records, read.
struct Part {
  std::unique_ptr<Gatherer> gathered;
  std::vector<BadPayload> bad;
};

// The pieces of one column, in order: where their rows begin, and the gathered values.
struct Pieces {
  ColumnType type = ColumnType::kInt64;
  bool claimed = false, typed = false, shared = false;
  std::vector<std::pair<std::size_t, const Gathered*>> of;
};

template <class T>
void append(std::vector<T>& to, const Heap& values) {
  const std::size_t had = to.size();
  to.resize(had + values.size() / sizeof(T));
  if (values.size() > 0) std::memcpy(to.data() + had, values.data(), values.size());
}

void join(const Pieces& pieces, std::size_t records, ParsedColumn& column) {
  column.type = pieces.type;
  column.shared = pieces.shared;
  column.splits.resize((pieces.shared ? 1 : records) + 1);
  std::size_t values = 0, lengths = 0;
  for (const auto& [first, piece] : pieces.of) {
    values += piece->values.size();
    lengths += piece->lengths.size();
  }
  if (column.type == ColumnType::kInt64) column.ints.reserve(values / sizeof(std::int64_t));
  if (column.type == ColumnType::kFloat) column.floats.reserve(values / sizeof(float));
  if (column.type == ColumnType::kBytes) {
    column.bytes.reserve(values);
    column.inner.reserve(lengths / sizeof(Gathered::Length) + 1);
    column.inner.push_back(0);
  }
  for (const auto& [first, piece] : pieces.of) {
    for (const auto& cell : piece->cells) column.splits[first + cell.row + 1] = cell.count;
    switch (column.type) {
      case ColumnType::kInt64:
        append(column.ints, piece->values);
        break;
      case ColumnType::kFloat:
        append(column.floats, piece->values);
        break;
      case ColumnType::kBytes:
        append(column.bytes, piece->values);
        for (std::size_t at = 0; at < piece->lengths.size(); at += sizeof(Gathered::Length)) {
          Gathered::Length length;
          std::memcpy(&length, piece->lengths.data() + at, sizeof length);
          column.inner.push_back(column.inner.back() + length);
        }
    }
  }
  for (std::size_t row = 1; row < column.splits.size(); ++row) column.splits[row] += column.splits[row - 1];
}

void run(Workers* workers, std::size_t tasks, const std::function<void(std::size_t)>& work) {
  if (workers != nullptr) return workers->run(tasks, work);
  for (std::size_t task = 0; task < tasks; ++task) work(task);
}

// Joins the gathered values, part after part, into whole columns.
void finish(std::span<const Part> parts, Workers* workers, ParsedExamples& to) {
  std::map<std::string_view, Pieces> by_name;
  for (const Part& part : parts) {
    for (const Gathered& column : part.gathered->columns()) {
      if (column.cells.empty() || !column.typed) continue;
      Pieces& pieces = by_name[column.name];
      // A column is of the type of its values, and if no record has any, of the first list without.
      if (!pieces.typed || (column.claimed && !pieces.claimed)) pieces.type = column.type;
      pieces.typed = true;
      pieces.claimed |= column.claimed;
      pieces.shared |= column.shared;
      pieces.of.emplace_back(to.records, &column);
    }
    to.records += part.gathered->rows();
  }
  if (!by_name.empty() && to.records > kMaxCells / by_name.size())
    throw std::length_error("these are " + std::to_string(by_name.size()) + " columns of " +
                            std::to_string(to.records) +
                            " records, too many to lay out. Records of one source share their columns; "
                            "if these do not, name the columns to read.");
  to.columns.resize(by_name.size());
  std::vector<const Pieces*> sources;
  for (const auto& [name, pieces] : by_name) {
    to.columns[sources.size()].name = name;
    sources.push_back(&pieces);
  }
  run(workers, sources.size(), [&](std::size_t i) { join(*sources[i], to.records, to.columns[i]); });
}

// Whether columns have their values in the types of the records before.
bool agrees(const Gatherer& gathered, const Types& types) {
  return std::ranges::all_of(gathered.columns(), [&](const Gathered& column) {
    if (column.cells.empty() || !column.claimed) return true;
    const auto type = types.find(column.name);
    return type == types.end() || type->second == column.type;
  });
}

}  // namespace

ExampleParser::ExampleParser(ExampleKind kind, std::optional<std::vector<std::string>> wanted,
                             std::shared_ptr<Workers> workers, std::size_t task_bytes)
    : kind_(kind),
      wanted_(wanted ? Wanted(std::in_place, wanted->begin(), wanted->end()) : Wanted()),
      workers_(std::move(workers)),
      task_bytes_(task_bytes) {}

ParsedExamples ExampleParser::parse(std::span<const Payload> payloads) const {
  if (kind_ == ExampleKind::kExampleBatch)
    throw std::invalid_argument("a batch is many records: ask for parse_batches");
  std::vector<std::size_t> begins{0};
  for (std::size_t i = 0, bytes = 0; i < payloads.size(); ++i) {
    bytes += payloads[i].size() + 1;
    if (bytes < task_bytes_ && i + 1 < payloads.size()) continue;
    begins.push_back(i + 1);
    bytes = 0;
  }
  std::vector<Part> parts(begins.size() - 1);
  const auto read = [&](std::size_t task, const Types* types) {
    Part part{std::make_unique<Gatherer>(kind_, wanted_, types), {}};
    for (std::size_t i = begins[task]; i < begins[task + 1]; ++i) {
      try {
        part.gathered->record(payloads[i]);
      } catch (BadMessage& bad) {
        part.bad.push_back({i, std::move(bad.reason)});
      }
    }
    parts[task] = std::move(part);
  };
  run(workers_.get(), parts.size(), [&](std::size_t task) { read(task, nullptr); });
  // Each part was read as if it were the first. One that began with a type of its own is read again,
  // with the types of those before it, and then is what one thread would have made of it.
  Types types;
  for (std::size_t task = 0; task < parts.size(); ++task) {
    if (!agrees(*parts[task].gathered, types)) read(task, &types);
    for (const Gathered& column : parts[task].gathered->columns())
      if (!column.cells.empty() && column.claimed) types.emplace(column.name, column.type);
  }
  // What is wrong with a bad record is said in view of all types, or it would depend on who read it.
  Gatherer judge(kind_, wanted_, &types);
  for (Part& part : parts) {
    for (BadPayload& bad : part.bad) {
      try {
        judge.record(payloads[bad.index]);
      } catch (BadMessage& found) {
        bad.reason = std::move(found.reason);
      }
    }
  }
  ParsedExamples parsed;
  for (Part& part : parts)
    parsed.bad.insert(parsed.bad.end(), std::make_move_iterator(part.bad.begin()),
                      std::make_move_iterator(part.bad.end()));
  finish(parts, workers_.get(), parsed);
  return parsed;
}

ParsedColumn ParsedColumn::without_rows(ColumnType type) {
  ParsedColumn column;
  column.type = type;
  column.splits.push_back(0);
  if (type == ColumnType::kBytes) column.inner.push_back(0);
  return column;
}

void ParsedColumn::close_row() {
  const std::size_t values = type == ColumnType::kInt64   ? ints.size()
                             : type == ColumnType::kFloat ? floats.size()
                                                          : inner.size() - 1;
  splits.push_back(static_cast<std::int64_t>(values));
}

void ParsedColumn::drop_row() {
  const auto values = static_cast<std::size_t>(splits.back());
  if (type == ColumnType::kInt64) ints.resize(values);
  if (type == ColumnType::kFloat) floats.resize(values);
  if (type == ColumnType::kBytes) {
    inner.resize(values + 1);
    bytes.resize(static_cast<std::size_t>(inner.back()));
  }
}

std::vector<ParsedExamples> ExampleParser::parse_batches(std::span<const Payload> payloads) const {
  if (kind_ != ExampleKind::kExampleBatch)
    throw std::invalid_argument("only an ExampleBatch is many records");
  std::vector<ParsedExamples> parsed(payloads.size());
  run(workers_.get(), payloads.size(), [&](std::size_t i) {
    Part part{std::make_unique<Gatherer>(kind_, wanted_, nullptr), {}};
    try {
      part.gathered->batch(payloads[i]);
      finish({&part, 1}, nullptr, parsed[i]);
    } catch (BadMessage& bad) {
      parsed[i].bad.push_back({0, std::move(bad.reason)});
    } catch (const std::length_error& bad) {
      parsed[i] = {};
      parsed[i].bad.push_back({0, bad.what()});
    }
  });
  return parsed;
}

}  // namespace monolith
