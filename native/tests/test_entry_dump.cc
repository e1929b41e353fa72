#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "entry_dump.h"
#include "tfrecord.h"

namespace {

using namespace monolith;
using Bytes = std::vector<std::byte>;

Bytes unhex(std::string_view hex) {
  Bytes result;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    result.push_back(static_cast<std::byte>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  return result;
}

Bytes framed(const Bytes& payload) {
  Bytes record(record_size(payload.size()));
  std::copy(payload.begin(), payload.end(), record.begin() + kRecordHeader);
  seal_record(record);
  return record;
}

struct Rows {
  std::vector<std::int64_t> ids, event_times;
  std::vector<float> values, state;
  EntryColumns columns() const { return {ids, event_times, values, state}; }
};

Bytes encoded(const EntryDumpCodec& codec, const Rows& rows) {
  Bytes out(codec.encoded_size(rows.columns()));
  codec.encode(rows.columns(), out);
  return out;
}

Bytes message(const EntryDumpCodec& codec, const Rows& rows) {
  Bytes out(codec.message_sizes(rows.columns()).at(0));
  const std::span<std::byte> place(out);
  codec.encode_messages(rows.columns(), std::span(&place, 1));
  return out;
}

std::vector<DumpSegment> one_segment_of_each_kind(std::size_t dim) {
  std::vector<DumpSegment> segments;
  for (const auto& [name, kind] : kOptimizerNames)
    if (kind != OptimizerKind::kRowwiseAdagrad) segments.push_back({kind, dim});  // which is refused
  return segments;
}

// Random bits in every float, so nothing that looks like a number is privileged.
Rows random_rows(const EntryDumpCodec& codec, std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Rows rows;
  const auto bits = [&](std::vector<float>& to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto word = static_cast<std::uint32_t>(random());
      to.emplace_back();
      std::memcpy(&to.back(), &word, sizeof word);
    }
  };
  for (std::size_t i = 0; i < n; ++i) {
    rows.ids.push_back(static_cast<std::int64_t>(random()));
    rows.event_times.push_back(static_cast<std::int64_t>(random() >> random() % 64));
    bits(rows.values, codec.dim());
    bits(rows.state, codec.state_dim());
  }
  return rows;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

void bytes_are_those_of_upstream() {
  const EntryDumpCodec codec({{OptimizerKind::kSgd, 1}});
  const Rows rows{{5}, {0}, {2.5f}, {}};
  CHECK(message(codec, rows) == unhex("09050000000000000015000020401a040a0212002000"));
  CHECK(encoded(codec, rows) ==
        unhex("16000000000000004f61be2809050000000000000015000020401a040a0212002000f10af2b5"));
}

void a_message_without_id_begins_with_its_values() {
  const EntryDumpCodec codec({{OptimizerKind::kSgd, 1}});
  CHECK(message(codec, {{}, {-1}, {2.5f}, {}}) == unhex("15000020401a040a02120020ffffffffffffffffff01"));
}

void ftrl_writes_zero_before_norm_although_the_row_holds_norm_first() {
  const EntryDumpCodec codec({{OptimizerKind::kFtrl, 1}});
  // norm 1.0 (0000803f), zero 2.0 (00000040)
  CHECK(message(codec, {{}, {1}, {0.f}, {1.f, 2.f}}) == unhex("1500000000"
                                                              "1a0e"
                                                              "0a0c"
                                                              "1a0a"
                                                              "0d00000040"
                                                              "150000803f"
                                                              "2001"));
}

void a_moving_average_segment_writes_no_optimizer_message() {
  const EntryDumpCodec alone({{OptimizerKind::kMovingAverage, 1}});
  CHECK(message(alone, {{}, {1}, {0.f}, {}}) == unhex("1500000000"
                                                      "1a00"
                                                      "2001"));
  const EntryDumpCodec codec({{OptimizerKind::kMovingAverage, 1},
                              {OptimizerKind::kGroupAdagrad, 1},
                              {OptimizerKind::kMovingAverage, 2}});
  const Rows rows{{9}, {1}, {1.f, 2.f, 3.f, 4.f}, {0.5f}};
  const auto back = codec.decode(encoded(codec, rows));
  CHECK(!back.failure);
  CHECK(back.state == rows.state);
  CHECK(back.state_missing == std::vector<std::uint8_t>{0});
}

void every_optimizer_comes_back_bit_for_bit() {
  for (const std::size_t dim : {1, 3, 32}) {
    for (const auto& [name, kind] : kOptimizerNames) {
      if (kind == OptimizerKind::kRowwiseAdagrad) continue;  // is refused
      const EntryDumpCodec codec({{kind, dim}});
      const Rows rows = random_rows(codec, 20, dim);
      const Bytes bytes = encoded(codec, rows);
      const auto back = codec.decode(bytes);
      CHECK(!back.failure);
      CHECK_EQUAL(back.consumed, bytes.size());
      CHECK(back.ids == rows.ids && back.event_times == rows.event_times);
      CHECK(same_bits(back.values, rows.values) && same_bits(back.state, rows.state));
      CHECK(back.state_missing == std::vector<std::uint8_t>(20, 0));
    }
    const EntryDumpCodec all(one_segment_of_each_kind(dim));
    const Rows rows = random_rows(all, 50, dim);
    const auto back = all.decode(encoded(all, rows));
    CHECK(!back.failure && same_bits(back.values, rows.values) && same_bits(back.state, rows.state));
  }
}

void an_empty_buffer_holds_no_rows() {
  const EntryDumpCodec codec({{OptimizerKind::kSgd, 1}});
  const auto back = codec.decode({});
  CHECK(!back.failure && back.ids.empty() && back.consumed == 0);
}

void missing_state_is_flagged_and_missing_time_reads_as_zero() {
  const EntryDumpCodec adagrad({{OptimizerKind::kAdagrad, 1}});
  const auto bare =
      framed(unhex("090500000000000000"
                   "1500002040"));
  auto back = adagrad.decode(bare);
  CHECK(!back.failure);
  CHECK(back.state_missing == std::vector<std::uint8_t>{1});
  CHECK(back.event_times == std::vector<std::int64_t>{0});
  CHECK(back.state == std::vector<float>{0});
  CHECK(EntryDumpCodec({{OptimizerKind::kSgd, 1}}).decode(bare).state_missing ==
        std::vector<std::uint8_t>{0});
  // Two segments, one message: the second segment's state is missing. An empty message counts as none.
  const EntryDumpCodec two({{OptimizerKind::kAdagrad, 1}, {OptimizerKind::kMomentum, 1}});
  back =
      two.decode(framed(unhex("090500000000000000"
                              "1500002040"
                              "1500002040"
                              "1a09"
                              "0a07"
                              "0a05"
                              "0d0000803f")));
  CHECK(!back.failure && back.state_missing == std::vector<std::uint8_t>{1});
  CHECK(back.state == std::vector<float>({1, 0}));
  back =
      two.decode(framed(unhex("090500000000000000"
                              "1500002040"
                              "1500002040"
                              "1a0b"
                              "0a00"
                              "0a07"
                              "4a05"
                              "0d0000803f")));
  CHECK(!back.failure && back.state_missing == std::vector<std::uint8_t>{1});
  CHECK(back.state == std::vector<float>({0, 1}));
}

void packed_floats_and_unknown_fields_are_understood() {
  const EntryDumpCodec codec({{OptimizerKind::kAdagrad, 2}});
  const auto back =
      codec.decode(framed(unhex("f80701"
                                "090500000000000000"
                                "1208"
                                "0000803f00000040"
                                "a2060161"  // fields 127 and 100 are not ours
                                "1a0c"
                                "0a0a"
                                "0a08"
                                "0a04"
                                "0000803f"
                                "2801"
                                "2a00"
                                "2007")));
  CHECK(back.failure && back.failure->reason.find("wrong state length") == 0);  // one norm, two values
  const auto good =
      codec.decode(framed(unhex("f80701"
                                "090500000000000000"
                                "1208"
                                "0000803f00000040"
                                "a2060161"
                                "1a10"
                                "0a0e"
                                "0a0c"
                                "0a08"
                                "0000803f00000040"
                                "2801"
                                "2007")));
  CHECK(!good.failure);
  CHECK(good.values == std::vector<float>({1, 2}));
  CHECK(good.state == std::vector<float>({1, 2}));
  CHECK(good.event_times == std::vector<std::int64_t>{7});
}

void of_a_scalar_written_twice_the_last_counts() {
  const EntryDumpCodec codec({{OptimizerKind::kGroupAdagrad, 1}});
  const auto back =
      codec.decode(framed(unhex("090500000000000000"
                                "1500002040"
                                "1a0e"
                                "0a0c"
                                "7a0a"
                                "0d0000803f"
                                "0d00000040")));
  CHECK(!back.failure);
  CHECK(back.state == std::vector<float>{2});
}

void a_bad_record_is_named_with_its_offset_and_the_rows_before_it_are_kept() {
  const EntryDumpCodec codec({{OptimizerKind::kAdagrad, 2}});
  const Rows rows = random_rows(codec, 3, 1);
  const Bytes good = encoded(codec, rows);
  const std::size_t record = codec.decode(good).consumed / 3;  // about: sizes differ by the time's varint
  const auto expect = [&](const Bytes& bytes, std::string_view reason, bool truncated) {
    const auto back = codec.decode(bytes);
    CHECK(back.failure.has_value());
    if (!back.failure) return;
    CHECK_EQUAL(back.failure->reason.substr(0, reason.size()), reason);
    CHECK_EQUAL(back.failure->truncated, truncated);
    CHECK_EQUAL(back.failure->offset, back.consumed);
    CHECK_EQUAL(back.values.size(), back.ids.size() * 2);
    CHECK_EQUAL(back.state.size(), back.ids.size() * 2);
    CHECK(back.ids == std::vector<std::int64_t>(rows.ids.begin(), rows.ids.begin() + back.ids.size()));
  };
  Bytes bytes = good;
  bytes[3] ^= std::byte{1};
  expect(bytes, "bad length checksum", false);
  bytes = good;
  bytes[record + 30] ^= std::byte{1};
  expect(bytes, "bad data checksum", false);
  bytes = good;
  bytes.pop_back();
  expect(bytes, "truncated record", true);
  bytes.resize(5);
  expect(bytes, "truncated record", true);
  const auto then = [&](std::string_view hex) {
    Bytes joined = good;
    const Bytes tail = framed(unhex(hex));
    joined.insert(joined.end(), tail.begin(), tail.end());
    return joined;
  };
  expect(then("1500002040"), "malformed message: no id", false);
  expect(then("0905"), "malformed message: a field reaches past the end", false);
  expect(then("0b"), "malformed message: wire type 3", false);
  expect(then("20ffffffffffffffffffff01"), "malformed message: a varint of more than ten bytes", false);
  expect(then("0905000000000000001207000000000000ff"), "malformed message: packed floats end inside", false);
  expect(then("0905000000000000001500002040"), "wrong number of values: the record has 1, the row has 2",
         false);
  expect(then("090500000000000000150000204015000020401500002040"), "wrong number of values", false);
  expect(then("090500000000000000150000204015000020401a040a021200"), "wrong optimizer message: field 2",
         false);
  expect(then("090500000000000000150000204015000020401a060a000a020a00"), "wrong optimizer message: more",
         false);
  expect(then("090500000000000000150000204015000020401a040a020a00"), "wrong state length", false);
}

void bad_arguments_are_refused() {
  CHECK_THROWS(std::invalid_argument, "at least one segment", EntryDumpCodec({}));
  CHECK_THROWS(std::invalid_argument, "got 0", EntryDumpCodec({{OptimizerKind::kSgd, 0}}));
  CHECK_THROWS(std::invalid_argument, "no message for the state of rowwise_adagrad",
               EntryDumpCodec({{OptimizerKind::kRowwiseAdagrad, 2}}));
  CHECK_THROWS(std::invalid_argument, "the core knows: sgd", optimizer_kind("lion"));
  const EntryDumpCodec codec({{OptimizerKind::kAdagrad, 2}});
  CHECK_THROWS(std::invalid_argument, "state has 1 elements, expected 2",
               codec.encoded_size(Rows{{1}, {1}, {1, 2}, {1}}.columns()));
}

// Any bytes at all must give an answer. Damage is done to payloads and sealed again, so that it gets
// past the checksums. Sanitizers do the watching.
void no_input_breaks_the_reader() {
  const EntryDumpCodec codec(one_segment_of_each_kind(2));
  const Rows rows = random_rows(codec, 1, 3);
  const Bytes seedling = message(codec, rows);
  std::mt19937_64 random(11);
  std::size_t accepted = 0;
  const auto start = std::chrono::steady_clock::now();
  std::size_t rounds = 0;
  const char* asked = std::getenv("MONOLITH_FUZZ_SECONDS");
  const double seconds = asked != nullptr ? std::atof(asked) : 1;
  for (std::chrono::duration<double> took{}; took.count() < seconds;
       took = std::chrono::steady_clock::now() - start) {
    for (int batch = 0; batch < 1000; ++batch, ++rounds) {
      Bytes payload = seedling;
      for (auto damage = random() % 4 + 1; damage > 0; --damage) {
        if (payload.empty()) break;
        const std::size_t at = random() % payload.size();
        switch (random() % 5) {
          case 0:
            payload[at] = static_cast<std::byte>(random());
            break;
          case 1:
            payload[at] ^= static_cast<std::byte>(1u << random() % 8);
            break;
          case 2:
            payload.erase(payload.begin() + at,
                          payload.begin() + std::min(at + random() % 12, payload.size()));
            break;
          case 3:
            payload.insert(payload.begin() + at, static_cast<std::byte>(random() % 3 ? random() : 0xff));
            break;
          default:
            payload.resize(at);
        }
      }
      Bytes bytes = framed(payload);
      if (random() % 8 == 0) bytes.resize(random() % (bytes.size() + 1));
      if (random() % 8 == 0 && !bytes.empty())
        bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      bytes.shrink_to_fit();  // so that one byte too far is out of bounds
      const auto back = codec.decode(bytes);
      accepted += back.ids.size();
      if (back.ids.size() * codec.dim() != back.values.size()) CHECK(false);
    }
  }
  std::cout << "  " << rounds << " damaged records, " << accepted << " still readable\n";
}

void speed() {
  const EntryDumpCodec codec({{OptimizerKind::kAdagrad, 32}});
  const Rows rows = random_rows(codec, 100000, 5);
  Bytes bytes(codec.encoded_size(rows.columns()));
  const auto seconds = [](auto body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const double out = seconds([&] { codec.encode(rows.columns(), bytes); });
  DecodedEntries back;
  const double in = seconds([&] { back = codec.decode(bytes); });
  CHECK(back.ids == rows.ids);
  std::cout << "  encode " << 0.1 / out << " M rows/s, decode " << 0.1 / in << " M rows/s of "
            << bytes.size() / rows.ids.size() << " bytes\n";
}

}  // namespace

int main() {
  return monolith::check::run({
      {"bytes are those of upstream", bytes_are_those_of_upstream},
      {"a message without id begins with its values", a_message_without_id_begins_with_its_values},
      {"ftrl writes zero before norm although the row holds norm first",
       ftrl_writes_zero_before_norm_although_the_row_holds_norm_first},
      {"a moving average segment writes no optimizer message",
       a_moving_average_segment_writes_no_optimizer_message},
      {"every optimizer comes back bit for bit", every_optimizer_comes_back_bit_for_bit},
      {"an empty buffer holds no rows", an_empty_buffer_holds_no_rows},
      {"missing state is flagged and missing time reads as zero",
       missing_state_is_flagged_and_missing_time_reads_as_zero},
      {"packed floats and unknown fields are understood", packed_floats_and_unknown_fields_are_understood},
      {"of a scalar written twice the last counts", of_a_scalar_written_twice_the_last_counts},
      {"a bad record is named with its offset and the rows before it are kept",
       a_bad_record_is_named_with_its_offset_and_the_rows_before_it_are_kept},
      {"bad arguments are refused", bad_arguments_are_refused},
      {"no input breaks the reader", no_input_breaks_the_reader},
      {"speed", speed},
  });
}
