#include "entry_dump.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "tfrecord.h"

namespace monolith {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are stored as they lie in memory");

enum Wire : std::uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

constexpr std::size_t kFloatField = 5;  // bytes: a tag, then the float

// Field numbers, and all are below 16: every tag is one byte.
constexpr std::uint8_t kId = 1, kNum = 2, kOpt = 3, kTime = 4;  // EntryDump
constexpr std::uint8_t kDump = 1;                               // OptimizerDump

constexpr std::byte tag(std::uint8_t field, Wire wire) {
  return static_cast<std::byte>(field << 3 | wire);
}

// One field of an optimizer's message, and where it lies in the segment's state.
struct Part {
  enum Shape : std::uint8_t { kPerValue, kScalar, kInt64 };
  std::uint8_t field = 0;  // 0: no such part
  Shape shape = kPerValue;
  std::uint8_t dims = 0;    // it begins after this many dims
  std::uint8_t floats = 0;  // and this many floats

  std::size_t offset(std::size_t dim) const { return dims * dim + floats; }
};

// The message of one optimizer: its field in SingleOptimizerDump, its parts in field order.
struct Message {
  std::uint8_t field = 0;  // 0: the optimizer writes none
  std::array<Part, 5> parts{};
};

Message message_of(OptimizerKind kind) {
  using enum Part::Shape;
  switch (kind) {
    case OptimizerKind::kAdagrad:
      return {1, {{{1, kPerValue}}}};
    case OptimizerKind::kSgd:
      return {2, {}};
    case OptimizerKind::kFtrl:  // zero is field 1, norm is field 2
      return {3, {{{1, kPerValue, 1}, {2, kPerValue, 0}}}};
    case OptimizerKind::kDynamicWdAdagrad:
      return {4, {{{1, kPerValue}, {2, kInt64, 1}}}};
    case OptimizerKind::kAdadelta:
      return {6, {{{1, kPerValue}, {2, kPerValue, 1}}}};
    case OptimizerKind::kAdam:
      return {7, {{{1, kPerValue}, {2, kPerValue, 1}, {3, kScalar, 2}, {4, kScalar, 2, 1}}}};
    case OptimizerKind::kAmsgrad:
      return {8,
              {{{1, kPerValue}, {2, kPerValue, 1}, {3, kPerValue, 2}, {4, kScalar, 3}, {5, kScalar, 3, 1}}}};
    case OptimizerKind::kMomentum:
      return {9, {{{1, kPerValue}}}};
    case OptimizerKind::kRmsprop:
      return {11, {{{1, kPerValue}}}};
    case OptimizerKind::kRmspropV2:
      return {12, {{{1, kPerValue}}}};
    case OptimizerKind::kGroupFtrl:
      return {13, {{{1, kPerValue, 1}, {2, kPerValue, 0}}}};
    case OptimizerKind::kBatchSoftmax:
      return {14, {{{1, kInt64}}}};
    case OptimizerKind::kGroupAdagrad:
      return {15, {{{1, kScalar}}}};
    case OptimizerKind::kMovingAverage:
      break;
  }
  return {};
}

std::uint64_t int64_bits(const float* state) {
  std::uint64_t bits;
  std::memcpy(&bits, state, sizeof bits);
  return bits;
}

std::size_t varint_size(std::uint64_t value) {
  return (std::bit_width(value | 1) + 6) / 7;
}

// Bytes of a field holding `size` bytes.
std::size_t bytes_field(std::size_t size) {
  return 1 + varint_size(size) + size;
}

std::size_t body_size(const Message& message, std::size_t dim, const float* state) {
  std::size_t size = 0;
  for (const Part& part : message.parts) {
    if (part.field == 0) break;
    if (part.shape == Part::kInt64)
      size += 1 + varint_size(int64_bits(state + part.offset(dim)));
    else
      size += kFloatField * (part.shape == Part::kPerValue ? dim : 1);
  }
  return size;
}

std::byte* put_varint(std::byte* at, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = static_cast<std::byte>(value | 0x80);
  *at++ = static_cast<std::byte>(value);
  return at;
}

std::byte* put_bytes_header(std::byte* at, std::uint8_t field, std::size_t size) {
  *at++ = tag(field, kBytes);
  return put_varint(at, size);
}

std::byte* put_floats(std::byte* at, std::uint8_t field, const float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i, at += kFloatField) {
    *at = tag(field, kFixed32);
    std::memcpy(at + 1, values + i, sizeof(float));
  }
  return at;
}

std::byte* put_body(std::byte* at, const Message& message, std::size_t dim, const float* state) {
  for (const Part& part : message.parts) {
    if (part.field == 0) break;
    const float* from = state + part.offset(dim);
    if (part.shape == Part::kInt64) {
      *at++ = tag(part.field, kVarint);
      at = put_varint(at, int64_bits(from));
    } else {
      at = put_floats(at, part.field, from, part.shape == Part::kPerValue ? dim : 1);
    }
  }
  return at;
}

// Thrown while reading one record and caught by decode(); never leaves this file.
struct BadRecord {
  std::string reason;
};

// Walks the fields of one message and never past its end.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

  bool next() {
    if (at_ == end_) return false;
    const std::uint64_t key = varint();
    field_ = key >> 3;
    wire_ = static_cast<std::uint8_t>(key & 7);
    if (field_ == 0 || field_ >= 1u << 29) throw BadRecord{"malformed message: field number out of range"};
    return true;
  }
  bool is(std::uint8_t field, Wire wire) const { return field_ == field && wire_ == wire; }
  std::uint64_t field() const { return field_; }
  std::uint8_t wire() const { return wire_; }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      const auto byte = static_cast<std::uint64_t>(*take(1));
      value |= (byte & 0x7f) << shift;  // the tenth byte keeps one bit, as protobuf does
      if (byte < 0x80) return value;
    }
    throw BadRecord{"malformed message: a varint of more than ten bytes"};
  }
  std::uint64_t fixed64() {
    std::uint64_t value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  float float32() {
    float value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::span<const std::byte> bytes() {
    const std::uint64_t size = varint();
    return {take(size), static_cast<std::size_t>(size)};
  }
  void skip() {
    switch (wire_) {
      case kVarint:
        varint();
        return;
      case kFixed64:
        take(8);
        return;
      case kBytes:
        bytes();
        return;
      case kFixed32:
        take(4);
        return;
      default:
        throw BadRecord{"malformed message: wire type " + std::to_string(wire_)};
    }
  }
  // Appends the floats of this field, packed or not, behind the `have` already at `to`, and those of the
  // same field that follow. Floats past `room` are counted and not stored, so that the caller can say
  // how many came.
  std::size_t floats(float* to, std::size_t have, std::size_t room) {
    if (wire_ == kBytes) {
      const auto packed = bytes();
      if (packed.size() % sizeof(float) != 0)
        throw BadRecord{"malformed message: packed floats end inside a float"};
      const std::size_t count = packed.size() / sizeof(float);
      if (have < room && count > 0)
        std::memcpy(to + have, packed.data(), std::min(count, room - have) * sizeof(float));
      return have + count;
    }
    const std::byte again = tag(static_cast<std::uint8_t>(field_), kFixed32);
    const std::byte* from = take(sizeof(float));
    for (;; from += kFloatField, at_ += kFloatField) {
      if (have < room) std::memcpy(to + have, from, sizeof(float));
      ++have;
      if (end_ - at_ < static_cast<std::ptrdiff_t>(kFloatField) || *at_ != again) return have;
    }
  }

 private:
  const std::byte* take(std::uint64_t size) {
    if (size > static_cast<std::uint64_t>(end_ - at_))
      throw BadRecord{"malformed message: a field reaches past the end"};
    const std::byte* from = at_;
    at_ += size;
    return from;
  }

  const std::byte* at_;
  const std::byte* end_;
  std::uint64_t field_ = 0;
  std::uint8_t wire_ = 0;
};

bool holds_floats(const Reader& reader) {
  return reader.wire() == kFixed32 || reader.wire() == kBytes;
}

void read_body(std::span<const std::byte> body, const DumpSegment& segment, float* state) {
  const Message message = message_of(segment.kind);
  std::array<std::size_t, 5> counts{};
  for (Reader reader(body); reader.next();) {
    const auto part = std::find_if(message.parts.begin(), message.parts.end(), [&](const Part& candidate) {
      return candidate.field != 0 && candidate.field == reader.field() &&
             (candidate.shape == Part::kInt64      ? reader.wire() == kVarint
              : candidate.shape == Part::kPerValue ? holds_floats(reader)
                                                   : reader.wire() == kFixed32);
    });
    if (part == message.parts.end()) {
      reader.skip();
      continue;
    }
    float* to = state + part->offset(segment.dim);
    if (part->shape == Part::kInt64) {
      const std::uint64_t value = reader.varint();
      std::memcpy(to, &value, sizeof value);
    } else if (part->shape == Part::kScalar) {
      *to = reader.float32();  // written twice, the last one counts
    } else {
      auto& count = counts[part - message.parts.begin()];
      count = reader.floats(to, count, segment.dim);
    }
  }
  for (std::size_t i = 0; i < counts.size(); ++i)
    if (message.parts[i].field != 0 && message.parts[i].shape == Part::kPerValue && counts[i] != segment.dim)
      throw BadRecord{"wrong state length: field " + std::to_string(message.parts[i].field) + " of " +
                      std::string(optimizer_name(segment.kind)) + " has " + std::to_string(counts[i]) +
                      " floats, the segment has " + std::to_string(segment.dim)};
}

// Reads one SingleOptimizerDump; false when it names no optimizer.
bool read_single_dump(std::span<const std::byte> dump, const DumpSegment& segment, float* state) {
  constexpr std::uint8_t kLastKnown = 15;
  const std::uint8_t wanted = message_of(segment.kind).field;
  std::span<const std::byte> body;
  bool found = false;
  for (Reader reader(dump); reader.next();) {
    if (reader.wire() != kBytes || reader.field() > kLastKnown) {
      reader.skip();
    } else if (reader.field() == wanted) {
      body = reader.bytes();
      found = true;
    } else {
      throw BadRecord{"wrong optimizer message: field " + std::to_string(reader.field()) + ", but " +
                      std::string(optimizer_name(segment.kind)) + " is field " + std::to_string(wanted)};
    }
  }
  if (found) read_body(body, segment, state);
  return found;
}

}  // namespace

EntryDumpCodec::EntryDumpCodec(std::vector<DumpSegment> segments) : segments_(std::move(segments)) {
  if (segments_.empty()) throw std::invalid_argument("an entry dump needs at least one segment");
  for (const DumpSegment& segment : segments_) {
    if (segment.dim < 1 || segment.dim > 1u << 24)
      throw std::invalid_argument("the dim of a segment must be 1 to 16777216, got " +
                                  std::to_string(segment.dim));
    dim_ += segment.dim;
    state_dim_ += state_floats(segment.kind, segment.dim);
  }
}

void EntryDumpCodec::check(const EntryColumns& rows) const {
  const std::size_t n = rows.event_times.size();
  const auto expect = [n](const char* name, std::size_t got, std::size_t wanted) {
    if (got != wanted)
      throw std::invalid_argument("entry dump of " + std::to_string(n) + " rows: " + name + " has " +
                                  std::to_string(got) + " elements, expected " + std::to_string(wanted));
  };
  if (!rows.ids.empty()) expect("ids", rows.ids.size(), n);
  expect("values", rows.values.size(), n * dim_);
  expect("state", rows.state.size(), n * state_dim_);
}

std::size_t EntryDumpCodec::optimizer_size(const float* state) const {
  std::size_t size = 0;
  for (const DumpSegment& segment : segments_) {
    const Message message = message_of(segment.kind);
    if (message.field != 0) size += bytes_field(bytes_field(body_size(message, segment.dim, state)));
    state += state_floats(segment.kind, segment.dim);
  }
  return size;
}

std::size_t EntryDumpCodec::message_size(const EntryColumns& rows, std::size_t row) const {
  return (rows.ids.empty() ? 0 : 1 + sizeof(std::int64_t)) + dim_ * kFloatField +
         bytes_field(optimizer_size(rows.state.data() + row * state_dim_)) + 1 +
         varint_size(static_cast<std::uint64_t>(rows.event_times[row]));
}

std::byte* EntryDumpCodec::write_message(const EntryColumns& rows, std::size_t row, std::byte* at) const {
  if (!rows.ids.empty()) {
    *at++ = tag(kId, kFixed64);
    std::memcpy(at, &rows.ids[row], sizeof(std::int64_t));
    at += sizeof(std::int64_t);
  }
  at = put_floats(at, kNum, rows.values.data() + row * dim_, dim_);
  const float* state = rows.state.data() + row * state_dim_;
  at = put_bytes_header(at, kOpt, optimizer_size(state));
  for (const DumpSegment& segment : segments_) {
    const Message message = message_of(segment.kind);
    if (message.field != 0) {
      const std::size_t body = body_size(message, segment.dim, state);
      at = put_bytes_header(at, kDump, bytes_field(body));
      at = put_bytes_header(at, message.field, body);
      at = put_body(at, message, segment.dim, state);
    }
    state += state_floats(segment.kind, segment.dim);
  }
  *at++ = tag(kTime, kVarint);
  return put_varint(at, static_cast<std::uint64_t>(rows.event_times[row]));
}

std::vector<std::size_t> EntryDumpCodec::message_sizes(const EntryColumns& rows) const {
  check(rows);
  std::vector<std::size_t> sizes(rows.event_times.size());
  for (std::size_t row = 0; row < sizes.size(); ++row) sizes[row] = message_size(rows, row);
  return sizes;
}

void EntryDumpCodec::encode_messages(const EntryColumns& rows,
                                     std::span<const std::span<std::byte>> outs) const {
  check(rows);
  if (outs.size() != rows.event_times.size())
    throw std::invalid_argument("entry dump: one place to write per row, please");
  for (std::size_t row = 0; row < outs.size(); ++row) {
    if (outs[row].size() != message_size(rows, row))
      throw std::invalid_argument("entry dump: the place to write is not of the message's size");
    write_message(rows, row, outs[row].data());
  }
}

std::size_t EntryDumpCodec::encoded_size(const EntryColumns& rows) const {
  check(rows);
  std::size_t size = 0;
  for (std::size_t row = 0; row < rows.event_times.size(); ++row)
    size += record_size(message_size(rows, row));
  return size;
}

void EntryDumpCodec::encode(const EntryColumns& rows, std::span<std::byte> out) const {
  check(rows);
  std::size_t at = 0;
  for (std::size_t row = 0; row < rows.event_times.size(); ++row) {
    const std::size_t size = record_size(message_size(rows, row));
    if (size > out.size() - at) throw std::invalid_argument("entry dump: no room to write the rows");
    write_message(rows, row, out.data() + at + kRecordHeader);
    seal_record(out.subspan(at, size));
    at += size;
  }
  if (at != out.size()) throw std::invalid_argument("entry dump: more room than the rows take");
}

void EntryDumpCodec::reserve(DecodedEntries& entries, std::size_t rows) const {
  entries.ids.reserve(rows);
  entries.event_times.reserve(rows);
  entries.values.reserve(rows * dim_);
  entries.state.reserve(rows * state_dim_);
  entries.state_missing.reserve(rows);
}

void EntryDumpCodec::read_message(std::span<const std::byte> message, DecodedEntries& to) const {
  to.values.resize(to.values.size() + dim_);
  to.state.resize(to.state.size() + state_dim_);
  float* values = to.values.data() + (to.values.size() - dim_);
  float* state = to.state.data() + (to.state.size() - state_dim_);
  const float* state_end = state + state_dim_;

  std::int64_t id = 0, time = 0;
  bool has_id = false;
  std::size_t value_count = 0;
  bool missing = false;
  auto segment = segments_.begin();
  const auto pass_segment = [&] {
    state += state_floats(segment->kind, segment->dim);
    ++segment;
  };
  const auto pass_silent = [&] {  // segments that write no message
    while (segment != segments_.end() && message_of(segment->kind).field == 0) pass_segment();
  };

  for (Reader reader(message); reader.next();) {
    if (reader.is(kId, kFixed64)) {
      id = static_cast<std::int64_t>(reader.fixed64());
      has_id = true;
    } else if (reader.field() == kNum && holds_floats(reader)) {
      value_count = reader.floats(values, value_count, dim_);
    } else if (reader.is(kTime, kVarint)) {
      time = static_cast<std::int64_t>(reader.varint());
    } else if (reader.is(kOpt, kBytes)) {
      for (Reader dumps(reader.bytes()); dumps.next();) {
        if (!dumps.is(kDump, kBytes)) {
          dumps.skip();
          continue;
        }
        pass_silent();
        if (segment == segments_.end())
          throw BadRecord{"wrong optimizer message: more of them than the row has segments"};
        const bool found = read_single_dump(dumps.bytes(), *segment, state);
        missing |= !found && state_floats(segment->kind, segment->dim) > 0;
        pass_segment();
      }
    } else {
      reader.skip();
    }
  }
  if (!has_id) throw BadRecord{"malformed message: no id"};
  if (value_count != dim_)
    throw BadRecord{"wrong number of values: the record has " + std::to_string(value_count) +
                    ", the row has " + std::to_string(dim_)};
  missing |= state != state_end;
  to.ids.push_back(id);
  to.event_times.push_back(time);
  to.state_missing.push_back(missing);
}

DecodedEntries EntryDumpCodec::decode(std::span<const std::byte> buffer) const {
  DecodedEntries entries;
  entries.dim = dim_;
  entries.state_dim = state_dim_;
  while (entries.consumed < buffer.size()) {
    const auto rest = buffer.subspan(entries.consumed);
    Record record = first_record(rest);
    if (record.failure.empty()) {
      if (entries.consumed == 0) reserve(entries, buffer.size() / record_size(record.payload.size()) + 1);
      try {
        read_message(record.payload, entries);
      } catch (const BadRecord& bad) {
        record.failure = bad.reason;
      }
    }
    if (!record.failure.empty()) {
      entries.values.resize(entries.ids.size() * dim_);
      entries.state.resize(entries.ids.size() * state_dim_);
      entries.failure = DumpFailure{entries.consumed, std::move(record.failure), record.truncated};
      break;
    }
    entries.consumed += record_size(record.payload.size());
  }
  return entries;
}

}  // namespace monolith
