#include "entry_dump.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "proto_reader.h"
#include "proto_writer.h"
#include "tfrecord.h"

namespace monolith {
namespace {

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
    case OptimizerKind::kMovingAverage:   // has no state
    case OptimizerKind::kRowwiseAdagrad:  // is refused: the format has no message for it
      break;
  }
  return {};
}

std::uint64_t int64_bits(const float* state) {
  std::uint64_t bits;
  std::memcpy(&bits, state, sizeof bits);
  return bits;
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

bool holds_floats(const ProtoReader& reader) {
  return reader.wire() == kFixed32 || reader.wire() == kBytes;
}

void read_message(std::span<const std::byte> body, const DumpSegment& segment, float* state) {
  const Message message = message_of(segment.kind);
  std::array<std::size_t, 5> counts{};
  for (ProtoReader reader(body); reader.next();) {
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
      throw BadMessage{"wrong state length: field " + std::to_string(message.parts[i].field) + " of " +
                       std::string(optimizer_name(segment.kind)) + " has " + std::to_string(counts[i]) +
                       " floats, the segment has " + std::to_string(segment.dim)};
}

// Reads one SingleOptimizerDump; false when it names no optimizer.
bool read_single_dump(std::span<const std::byte> dump, const DumpSegment& segment, float* state) {
  constexpr std::uint8_t kLastKnown = 15;
  const std::uint8_t wanted = message_of(segment.kind).field;
  std::span<const std::byte> body;
  bool found = false;
  for (ProtoReader reader(dump); reader.next();) {
    if (reader.wire() != kBytes || reader.field() > kLastKnown) {
      reader.skip();
    } else if (reader.field() == wanted) {
      body = reader.bytes();
      found = true;
    } else {
      throw BadMessage{"wrong optimizer message: field " + std::to_string(reader.field()) + ", but " +
                       std::string(optimizer_name(segment.kind)) + " is field " + std::to_string(wanted)};
    }
  }
  if (found) read_message(body, segment, state);
  return found;
}

}  // namespace

EntryDumpCodec::EntryDumpCodec(std::vector<DumpSegment> segments) : segments_(std::move(segments)) {
  if (segments_.empty()) throw std::invalid_argument("an entry dump needs at least one segment");
  for (const DumpSegment& segment : segments_) {
    if (segment.dim < 1 || segment.dim > 1u << 24)
      throw std::invalid_argument("the dim of a segment must be 1 to 16777216, got " +
                                  std::to_string(segment.dim));
    if (message_of(segment.kind).field == 0 && state_floats(segment.kind, segment.dim) != 0)
      throw std::invalid_argument("an entry dump has no message for the state of " +
                                  std::string(optimizer_name(segment.kind)));
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
    if (message.field != 0)
      size += bytes_field(kDump, bytes_field(message.field, body_size(message, segment.dim, state)));
    state += state_floats(segment.kind, segment.dim);
  }
  return size;
}

std::size_t EntryDumpCodec::message_size(const EntryColumns& rows, std::size_t row) const {
  return (rows.ids.empty() ? 0 : 1 + sizeof(std::int64_t)) + dim_ * kFloatField +
         bytes_field(kOpt, optimizer_size(rows.state.data() + row * state_dim_)) + 1 +
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
      at = put_bytes_header(at, kDump, bytes_field(message.field, body));
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

  for (ProtoReader reader(message); reader.next();) {
    if (reader.is(kId, kFixed64)) {
      id = static_cast<std::int64_t>(reader.fixed64());
      has_id = true;
    } else if (reader.field() == kNum && holds_floats(reader)) {
      value_count = reader.floats(values, value_count, dim_);
    } else if (reader.is(kTime, kVarint)) {
      time = static_cast<std::int64_t>(reader.varint());
    } else if (reader.is(kOpt, kBytes)) {
      for (ProtoReader dumps(reader.bytes()); dumps.next();) {
        if (!dumps.is(kDump, kBytes)) {
          dumps.skip();
          continue;
        }
        pass_silent();
        if (segment == segments_.end())
          throw BadMessage{"wrong optimizer message: more of them than the row has segments"};
        const bool found = read_single_dump(dumps.bytes(), *segment, state);
        missing |= !found && state_floats(segment->kind, segment->dim) > 0;
        pass_segment();
      }
    } else {
      reader.skip();
    }
  }
  if (!has_id) throw BadMessage{"malformed message: no id"};
  if (value_count != dim_)
    throw BadMessage{"wrong number of values: the record has " + std::to_string(value_count) +
                     ", the row has " + std::to_string(dim_)};
  missing |= state != state_end;
  to.ids.push_back(id);
  to.event_times.push_back(time);
  to.state_missing.push_back(missing);
}

DecodedEntries EntryDumpCodec::decode(std::span<const std::byte> buffer, std::size_t limit) const {
  DecodedEntries entries;
  entries.dim = dim_;
  entries.state_dim = state_dim_;
  while (entries.consumed < buffer.size() && entries.ids.size() < limit) {
    const auto rest = buffer.subspan(entries.consumed);
    Record record = first_record(rest);
    if (record.failure.empty()) {
      if (entries.consumed == 0)
        reserve(entries, std::min(limit, buffer.size() / record_size(record.payload.size()) + 1));
      try {
        read_message(record.payload, entries);
      } catch (const BadMessage& bad) {
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
