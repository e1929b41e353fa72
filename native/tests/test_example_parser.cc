#include <chrono>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "example_parser.h"
#include "example_writer.h"
#include "fid.h"
#include "frames.h"
#include "tfrecord.h"

namespace {

using namespace monolith;
using Bytes = std::string;  // of bytes, so that messages can be put together with +

Bytes varint(std::uint64_t value) {
  Bytes result;
  for (; value >= 0x80; value >>= 7) result += static_cast<char>(value | 0x80);
  return result + static_cast<char>(value);
}
Bytes key(std::uint32_t field, int wire) {
  return varint(field << 3 | static_cast<std::uint32_t>(wire));
}
Bytes message(std::uint32_t field, const Bytes& body) {
  return key(field, 2) + varint(body.size()) + body;
}
template <class T>
Bytes raw(T value) {
  Bytes result(sizeof value, '\0');
  std::memcpy(result.data(), &value, sizeof value);
  return result;
}
Bytes entry(const Bytes& name, const Bytes& feature) {
  return message(1, message(1, name) + message(2, feature));
}
Bytes packed_ints(std::initializer_list<std::int64_t> values) {
  Bytes body;
  for (const std::int64_t value : values) body += varint(static_cast<std::uint64_t>(value));
  return message(1, body);
}
Bytes packed_floats(std::initializer_list<float> values) {
  Bytes body;
  for (const float value : values) body += raw(value);
  return message(1, body);
}
Bytes packed_fids(std::initializer_list<std::uint64_t> values) {
  Bytes body;
  for (const std::uint64_t value : values) body += raw(value);
  return message(1, body);
}
// TensorFlow's Example with some entries.
Bytes tf(const Bytes& entries) {
  return message(1, entries);
}

std::vector<Payload> views(const std::vector<Bytes>& payloads) {
  std::vector<Payload> result;
  for (const Bytes& payload : payloads) result.push_back(std::as_bytes(std::span(payload)));
  return result;
}

ParsedExamples parse(ExampleKind kind, const std::vector<Bytes>& payloads,
                     std::optional<std::vector<std::string>> wanted = std::nullopt) {
  return ExampleParser(kind, std::move(wanted)).parse(views(payloads));
}

const ParsedColumn& column(const ParsedExamples& parsed, std::string_view name) {
  static const ParsedColumn none;
  for (const ParsedColumn& found : parsed.columns)
    if (found.name == name) return found;
  check::fail(__FILE__, __LINE__, "no column " + std::string(name));
  return none;
}

using Ints = std::vector<std::int64_t>;
using Floats = std::vector<float>;

void a_tf_example_becomes_columns() {
  const auto parsed =
      parse(ExampleKind::kTfExample,
            {tf(entry("i", message(3, packed_ints({1, -2}))) + entry("f", message(2, packed_floats({0.5f}))) +
                entry("s", message(1, message(1, "ab") + message(1, "") + message(1, "c")))),
             "", tf(entry("i", message(3, packed_ints({3}))))});
  CHECK_EQUAL(parsed.records, 3u);
  CHECK(parsed.bad.empty());
  CHECK(column(parsed, "i").ints == Ints({1, -2, 3}));
  CHECK(column(parsed, "i").splits == Ints({0, 2, 2, 3}));
  CHECK(column(parsed, "f").floats == Floats({0.5f}));
  CHECK(column(parsed, "f").splits == Ints({0, 1, 1, 1}));
  CHECK(column(parsed, "s").bytes == std::vector<std::uint8_t>({'a', 'b', 'c'}));
  CHECK(column(parsed, "s").inner == Ints({0, 2, 2, 3}));
}

void repeated_values_may_come_one_by_one() {
  const Bytes ints = key(1, 0) + varint(1) + packed_ints({2, 3}) + key(1, 0) + varint(4);
  const Bytes floats = key(1, 5) + raw(1.f) + key(1, 5) + raw(2.f);
  const auto parsed =
      parse(ExampleKind::kTfExample, {tf(entry("i", message(3, ints)) + entry("f", message(2, floats)))});
  CHECK(column(parsed, "i").ints == Ints({1, 2, 3, 4}));
  CHECK(column(parsed, "f").floats == Floats({1, 2}));
}

void a_name_may_follow_its_value_and_a_value_come_in_pieces() {
  const Bytes one = message(3, packed_ints({1})), two = message(3, packed_ints({2}));
  const auto parsed =
      parse(ExampleKind::kTfExample, {tf(message(1, message(2, one) + message(1, "i") + message(2, two)))});
  CHECK(column(parsed, "i").ints == Ints({1, 2}));
}

void of_a_key_that_comes_twice_the_last_counts() {
  const auto parsed =
      parse(ExampleKind::kTfExample,
            {tf(entry("i", message(3, packed_ints({1, 2}))) + entry("j", message(3, packed_ints({9}))) +
                entry("i", message(2, packed_floats({7}))))});
  CHECK(column(parsed, "i").floats == Floats({7}));
  CHECK(column(parsed, "j").ints == Ints({9}));
  // And of a oneof the last member.
  const auto again = parse(ExampleKind::kTfExample,
                           {tf(entry("i", message(2, packed_floats({7})) + message(3, packed_ints({1}))))});
  CHECK(column(again, "i").ints == Ints({1}));
}

void a_feature_of_another_type_than_before_makes_its_record_bad() {
  const Bytes ints = tf(entry("a", message(3, packed_ints({1}))));
  const Bytes floats =
      tf(entry("b", message(3, packed_ints({5}))) + entry("a", message(2, packed_floats({1}))));
  const Bytes empty = tf(entry("a", message(2, "")));
  const auto parsed = parse(ExampleKind::kTfExample, {empty, ints, floats, empty, ints});
  CHECK_EQUAL(parsed.records, 4u);
  CHECK_EQUAL(parsed.bad.size(), 1u);
  CHECK_EQUAL(parsed.bad[0].index, 2u);
  CHECK(parsed.bad[0].reason.find("column 'a' holds floats here, and integers in other records") !=
        std::string::npos);
  CHECK_EQUAL(parsed.columns.size(), 1u);  // nothing of the bad record is left
  CHECK(column(parsed, "a").splits == Ints({0, 0, 1, 1, 2}));
}

void a_column_without_values_is_of_the_type_of_its_lists() {
  const auto parsed = parse(ExampleKind::kTfExample, {tf(entry("a", message(2, ""))), tf(entry("b", ""))});
  CHECK_EQUAL(parsed.columns.size(), 1u);
  CHECK(column(parsed, "a").type == ColumnType::kFloat);
  CHECK(column(parsed, "a").splits == Ints({0, 0, 0}));
}

void only_wanted_columns_are_read() {
  const Bytes payload = tf(entry("a", message(3, packed_ints({1}))) + entry("b", message(2, "\xff\xff")));
  CHECK_EQUAL(parse(ExampleKind::kTfExample, {payload}).bad.size(), 1u);
  const auto parsed = parse(ExampleKind::kTfExample, {payload}, {{"a", "nowhere"}});
  CHECK(parsed.bad.empty());
  CHECK_EQUAL(parsed.columns.size(), 1u);
  CHECK(column(parsed, "a").ints == Ints({1}));
}

void every_member_of_a_feature_is_read() {
  const std::uint64_t v1 = std::uint64_t{700} << 54 | 0x3fff0000000001ULL;
  const auto v2 = make_fid(2, 700, v1);
  const auto named = [](const Bytes& name, const Bytes& feature) {
    return message(1, message(1, name) + message(2, feature));
  };
  const auto lists = [](const Bytes& a, const Bytes& b) { return message(1, a) + message(1, b); };
  const auto parsed =
      parse(ExampleKind::kExample,
            {named("1", message(1, packed_fids({v1}))) + named("2", message(2, packed_fids({5, 6}))) +
             named("3", message(3, packed_floats({1}))) + named("4", message(4, message(1, raw(2.0)))) +
             named("5", message(5, packed_ints({-1}))) + named("6", message(6, message(1, "x"))) +
             named("7", message(7, lists(packed_fids({1, 2}), packed_fids({3})))) +
             named("8", message(8, lists(packed_floats({1}), packed_floats({2})))) +
             named("9", message(9, lists(message(1, raw(1.0)), message(1, raw(2.0) + raw(3.0))))) +
             named("10", message(10, lists(packed_ints({1}), ""))) +
             named("11", message(11, lists(message(1, "a"), message(1, "b") + message(1, "c")))) +
             named("12", key(12, 0) + varint(9)) + named("13", key(13, 5) + raw(9.f)) +
             named("14", key(14, 1) + raw(9.0)) + named("15", message(15, "bytes")) +
             named("16", message(16, lists(packed_fids({v1}), packed_fids({v1}))))});
  CHECK(parsed.bad.empty());
  CHECK(column(parsed, "1").ints == Ints({v2}));
  CHECK_EQUAL(v2, std::int64_t{700} << 48 | 0xff0000000001);
  CHECK(column(parsed, "2").ints == Ints({5, 6}));
  CHECK(column(parsed, "4").floats == Floats({2}));
  CHECK(column(parsed, "5").ints == Ints({-1}));
  CHECK(column(parsed, "7").ints == Ints({1, 2, 3}));
  CHECK(column(parsed, "9").floats == Floats({1, 2, 3}));
  CHECK(column(parsed, "11").inner == Ints({0, 1, 2, 3}));
  CHECK(column(parsed, "12").ints == Ints({9}));
  CHECK(column(parsed, "13").floats == Floats({9}));
  CHECK(column(parsed, "14").floats == Floats({9}));
  CHECK(column(parsed, "15").inner == Ints({0, 5}));
  CHECK(column(parsed, "16").ints == Ints({v2, v2}));
}

Bytes line_id() {
  return key(2, 1) + raw(~std::uint64_t{0}) + key(3, 0) + varint(1700000000) +
         message(6, varint(1) + varint(2)) + key(6, 0) + varint(3) + key(27, 5) + raw(0.5f) +
         message(49, "me") + key(87, 0) + varint(5) + key(145, 0) + varint(static_cast<std::uint64_t>(-1));
}

void check_line_id(const ParsedExamples& parsed) {
  CHECK(column(parsed, "line_id.uid").ints == Ints({-1}));
  CHECK(column(parsed, "line_id.req_time").ints == Ints({1700000000}));
  CHECK(column(parsed, "line_id.actions").ints == Ints({1, 2, 3}));
  CHECK(column(parsed, "line_id.sample_rate").floats == Floats({0.5f}));
  CHECK(column(parsed, "line_id.user_id").bytes == std::vector<std::uint8_t>({'m', 'e'}));
  CHECK(column(parsed, "line_id.is_draw").ints == Ints({1}));
  CHECK(column(parsed, "line_id.rank").ints == Ints({-1}));
  CHECK(column(parsed, "label").floats == Floats({1, 0}));
  CHECK(column(parsed, "instance_weight").floats == Floats({2}));
}

void labels_weight_and_line_id_are_lifted_from_fields_and_from_features() {
  const auto named = [](const Bytes& name, const Bytes& feature) {
    return message(1, message(1, name) + message(2, feature));
  };
  const Bytes labels = raw(1.f) + raw(0.f);
  check_line_id(parse(ExampleKind::kExample, {message(100, line_id()) + message(101, labels) + key(102, 5) +
                                              raw(9.f) + key(102, 5) + raw(2.f)}));
  check_line_id(parse(ExampleKind::kExample, {named("__LINE_ID__", message(6, message(1, line_id()))) +
                                              named("__LABEL__", message(3, packed_floats({1, 0}))) +
                                              named("instance_weight", message(3, packed_floats({2})))}));
  check_line_id(parse(ExampleKind::kInstance, {message(5, line_id()) + key(3, 5) + raw(1.f) + key(3, 5) +
                                               raw(0.f) + key(4, 5) + raw(2.f)}));
}

void an_instance_has_its_ids_by_slot() {
  const auto v1 = [](std::uint64_t slot, std::uint64_t signature) { return slot << 54 | signature; };
  const Bytes feature = message(9, message(2, raw(std::uint64_t{8})) + message(1, "fc_x"));
  const auto parsed =
      parse(ExampleKind::kInstance,
            {packed_fids({v1(3, 1), v1(1023, 2), v1(3, 4)}) + feature + message(2, raw(1.5f)),
             key(1, 1) + raw(v1(3, 9)) +
                 message(9, message(1, "n") + message(8, packed_ints({1})) + message(8, packed_ints({2})))});
  CHECK(parsed.bad.empty());
  CHECK(column(parsed, "fc_slot_3").ints == Ints({make_fid(2, 3, 1), make_fid(2, 3, 4), make_fid(2, 3, 9)}));
  CHECK(column(parsed, "fc_slot_3").splits == Ints({0, 2, 3}));
  CHECK(column(parsed, "fc_slot_1023").ints == Ints({make_fid(2, 1023, 2)}));
  CHECK(column(parsed, "fc_x").ints == Ints({8}));
  CHECK(column(parsed, "value").floats == Floats({1.5f}));
  CHECK(column(parsed, "n").ints == Ints({1, 2}));
}

std::vector<ParsedExamples> parse_batches(const std::vector<Bytes>& payloads) {
  return ExampleParser(ExampleKind::kExampleBatch).parse_batches(views(payloads));
}

void a_batch_has_its_records_by_column_and_shares_what_is_shared() {
  const Bytes first = message(2, message(5, packed_ints({1}))),
              second = message(2, message(5, packed_ints({2, 3})));
  const Bytes line_ids = message(2, message(6, message(1, key(2, 1) + raw(std::uint64_t{7}))));
  const Bytes batch = message(1, first + message(1, "i") + second) +
                      message(1, message(1, "s") + second + key(3, 0) + varint(1)) +
                      message(1, message(1, "__LINE_ID__") + message(2, "") + line_ids) + key(3, 0) +
                      varint(2) + key(100, 0) + varint(77);
  const auto parsed = parse_batches({batch, key(3, 0) + varint(3), batch + key(3, 0) + varint(9)});
  CHECK_EQUAL(parsed[0].records, 2u);
  CHECK(column(parsed[0], "i").splits == Ints({0, 1, 3}));
  CHECK(!column(parsed[0], "i").shared);
  CHECK(column(parsed[0], "s").shared && column(parsed[0], "s").ints == Ints({2, 3}));
  CHECK(column(parsed[0], "s").splits == Ints({0, 2}));
  CHECK(column(parsed[0], "line_id.uid").splits == Ints({0, 0, 1}));
  CHECK(column(parsed[0], "data_source_key").shared &&
        column(parsed[0], "data_source_key").ints == Ints({77}));
  CHECK(parsed[1].records == 3 && parsed[1].columns.empty() && parsed[1].bad.empty());
  CHECK(parsed[2].bad.size() == 1 && parsed[2].records == 0);
  CHECK(parsed[2].bad[0].reason.find("list 'i' has 2 features for 9 records") != std::string::npos);
}

void batches_that_make_no_sense_are_bad() {
  const Bytes list = message(1, message(1, "a") + message(2, message(5, packed_ints({1}))));
  const Bytes line_id = message(
      1, message(1, "__LINE_ID__") + message(2, message(6, message(1, key(2, 1) + raw(std::uint64_t{7})))));
  const Bytes uid = message(1, message(1, "line_id.uid") + message(2, message(5, packed_ints({1}))));
  const Bytes one = key(3, 0) + varint(1);
  for (const Bytes& bad : {list + list + one, list, line_id + uid + one, uid + line_id + one,
                           key(3, 0) + varint(static_cast<std::uint64_t>(-1)), key(3, 0) + varint(1 << 30),
                           message(1, message(1, "a") + key(3, 0) + varint(1)) + one}) {
    const auto parsed = parse_batches({bad});
    CHECK(parsed[0].bad.size() == 1 && parsed[0].columns.empty());
  }
}

void malformed_payloads_are_named_and_the_others_kept() {
  const Bytes good = tf(entry("a", message(3, packed_ints({1}))));
  const std::vector<std::pair<Bytes, std::string>> bad{
      {"\x0a", "reaches past the end"},
      {"\x0a\x05", "reaches past the end"},
      {Bytes("\x00", 1), "field number"},
      {"\x0b", "wire type 3"},
      {"\x0c", "wire type 4"},
      {"\x0e", "wire type 6"},
      {key(1, 0) + Bytes(11, '\xff'), "more than ten bytes"},
      {tf(entry("a", message(2, message(1, "123")))), "end inside a value"},
      {tf(entry("\xff", message(3, ""))), "not UTF-8"},
      {tf(entry("\xc0\x80", message(3, ""))), "not UTF-8"},
      {tf(entry("\xed\xa0\x80", message(3, ""))), "not UTF-8"},
      {key(1, 2) + varint(~std::uint64_t{0}), "reaches past the end"},
  };
  for (const auto& [payload, reason] : bad) {
    const auto parsed = parse(ExampleKind::kTfExample, {good, payload, good});
    CHECK_EQUAL(parsed.records, 2u);
    CHECK(parsed.bad.size() == 1 && parsed.bad[0].index == 1);
    if (!parsed.bad.empty()) CHECK(parsed.bad[0].reason.find(reason) != std::string::npos);
    CHECK(column(parsed, "a").ints == Ints({1, 1}));
  }
  // Unknown fields, and known ones of another wire type, are passed over.
  const Bytes odd = key(7, 0) + varint(1) + key(8, 5) + raw(1) + key(9, 1) + raw(1.0) + message(10, "x") +
                    key(1, 0) + varint(3);
  CHECK(parse(ExampleKind::kTfExample, {odd + good}).bad.empty());
}

// Columns of every type, of which some rows are empty.
struct Sample {
  explicit Sample(std::size_t records) : records(records) {
    for (std::size_t i = 0; i < records; ++i) {
      for (std::size_t k = 0; k < i % 4; ++k) {
        ids.push_back(static_cast<std::int64_t>(i * 1000003 + k) & 0xffffffffffff);
        numbers.push_back(static_cast<float>(i) / 3);
        text.insert(text.end(), k, static_cast<std::uint8_t>('a' + i % 26));
        inner.push_back(static_cast<std::int64_t>(text.size()));
      }
      splits.push_back(static_cast<std::int64_t>(ids.size()));
      ones.push_back(static_cast<std::int64_t>(i + 1));
      weights.push_back(0.5f);
      times.push_back(1700000000 + static_cast<std::int64_t>(i));
    }
  }

  std::vector<ColumnView> columns(bool line_id) const {
    std::vector<ColumnView> made{
        {"fc_ids", ColumnType::kInt64, false, true, splits, ids, {}, {}, {}},
        {"ints", ColumnType::kInt64, false, false, splits, ids, {}, {}, {}},
        {"label", ColumnType::kFloat, false, false, splits, {}, numbers, {}, {}},
        {"strings", ColumnType::kBytes, false, false, splits, {}, {}, text, inner},
    };
    if (line_id) {
      made.push_back({"instance_weight", ColumnType::kFloat, false, false, ones, {}, weights, {}, {}});
      made.push_back({"line_id.req_time", ColumnType::kInt64, false, false, ones, times, {}, {}, {}});
      made.push_back(
          {"line_id.special_strategies", ColumnType::kInt64, false, false, ones, small(), {}, {}, {}});
    }
    return made;
  }
  const Ints& small() const {
    static Ints values;
    values.assign(records, 7);
    return values;
  }

  std::size_t records;
  Ints ids, splits{0}, inner{0}, ones{0}, times;
  Floats numbers, weights;
  std::vector<std::uint8_t> text;
};

std::vector<Payload> payloads_of(const EncodedExamples& encoded) {
  std::vector<Payload> result;
  for (std::size_t i = 0; i + 1 < encoded.splits.size(); ++i)
    result.push_back(
        std::span(encoded.data).subspan(encoded.splits[i], encoded.splits[i + 1] - encoded.splits[i]));
  return result;
}

constexpr ExampleKind kRowKinds[] = {ExampleKind::kTfExample, ExampleKind::kExample, ExampleKind::kInstance};

void check_sample(const ParsedExamples& parsed, const Sample& sample) {
  CHECK_EQUAL(parsed.records, sample.records);
  CHECK(column(parsed, "fc_ids").ints == sample.ids);
  CHECK(column(parsed, "ints").ints == sample.ids);
  CHECK(column(parsed, "ints").splits == sample.splits);
  CHECK(column(parsed, "label").floats == sample.numbers);
  CHECK(column(parsed, "strings").bytes == sample.text);
  CHECK(column(parsed, "strings").inner == sample.inner);
}

void what_is_written_reads_the_same() {
  const Sample sample(100);
  for (const ExampleKind kind : kRowKinds) {
    const auto encoded = encode_examples(kind, 100, sample.columns(kind != ExampleKind::kTfExample));
    const auto parsed = ExampleParser(kind).parse(payloads_of(encoded));
    CHECK(parsed.bad.empty());
    check_sample(parsed, sample);
    if (kind != ExampleKind::kTfExample) CHECK(column(parsed, "line_id.req_time").ints == sample.times);
  }
  const auto encoded = encode_examples(ExampleKind::kExampleBatch, 100, sample.columns(true));
  const auto parsed = ExampleParser(ExampleKind::kExampleBatch).parse_batches(payloads_of(encoded));
  CHECK(parsed.size() == 1 && parsed[0].bad.empty());
  check_sample(parsed[0], sample);
  CHECK(column(parsed[0], "line_id.req_time").ints == sample.times);
}

void columns_that_fit_no_field_are_refused() {
  const Sample sample(2);
  const Ints ones{0, 1, 2}, big{1, std::int64_t{1} << 40};
  const auto refuse = [&](const ColumnView& column, const char* why) {
    CHECK_THROWS(std::invalid_argument, why, encode_examples(ExampleKind::kExample, 2, {&column, 1}));
  };
  refuse({"label", ColumnType::kInt64, false, false, ones, big, {}, {}, {}}, "holds floats there");
  refuse({"line_id.nothing", ColumnType::kInt64, false, false, ones, big, {}, {}, {}}, "no such field");
  refuse({"line_id.rank", ColumnType::kInt64, false, false, ones, big, {}, {}, {}}, "32 bits");
  refuse({"data_source_key", ColumnType::kInt64, false, false, ones, big, {}, {}, {}}, "32 bits");
  const Ints both{0, 2, 2}, short_splits{0, 2}, falling{0, 3, 2};
  refuse({"line_id.uid", ColumnType::kInt64, false, false, both, big, {}, {}, {}}, "one value there");
  refuse({"a", ColumnType::kInt64, false, false, short_splits, big, {}, {}, {}}, "row splits");
  refuse({"a", ColumnType::kInt64, false, false, falling, big, {}, {}, {}}, "row splits");
  refuse({"a", ColumnType::kBytes, false, false, ones, {}, {}, {}, {}}, "row splits");
}

// A prefix of a message ends inside a field, or is a shorter message.
void every_truncation_is_bad_or_a_shorter_record() {
  const Sample sample(8);
  for (const ExampleKind kind :
       {ExampleKind::kTfExample, ExampleKind::kExample, ExampleKind::kInstance, ExampleKind::kExampleBatch}) {
    const auto encoded = encode_examples(kind, 8, sample.columns(kind != ExampleKind::kTfExample));
    for (const Payload payload : payloads_of(encoded)) {
      std::size_t good = 0;
      for (std::size_t size = 0; size < payload.size(); ++size) {
        const std::vector<std::byte> cut(payload.begin(), payload.begin() + size);  // of its own memory
        const Payload view(cut);
        const ExampleParser parser(kind);
        if (kind == ExampleKind::kExampleBatch)
          good += parser.parse_batches({&view, 1})[0].bad.empty();
        else
          good += parser.parse({&view, 1}).bad.empty();
      }
      CHECK(good <= 12);  // the places between the fields
    }
  }
}

void threads_and_tasks_make_no_difference() {
  std::mt19937_64 random(3);
  std::vector<Bytes> payloads;
  for (int i = 0; i < 2000; ++i) {
    const Bytes name(1, static_cast<char>('a' + random() % 6));
    switch (random() % 12) {
      case 0:
        payloads.push_back("\x0a\x7f");
        break;
      case 1:
        payloads.push_back(tf(entry(name, message(2, packed_floats({1, 2})))));
        break;
      case 2:
        payloads.push_back(tf(entry(name, message(2, ""))));
        break;
      default:
        payloads.push_back(
            tf(entry("z", message(3, packed_ints({i}))) + entry(name, message(3, packed_ints({i, 2})))));
    }
  }
  const auto expected = parse(ExampleKind::kTfExample, payloads);
  CHECK(!expected.bad.empty() && expected.records + expected.bad.size() == 2000);
  for (const int threads : {1, 2, 4}) {
    for (const std::size_t task_bytes : {1, 100, 5000}) {
      const auto found =
          ExampleParser(ExampleKind::kTfExample, std::nullopt, std::make_shared<Workers>(threads), task_bytes)
              .parse(views(payloads));
      CHECK_EQUAL(found.records, expected.records);
      CHECK_EQUAL(found.bad.size(), expected.bad.size());
      CHECK_EQUAL(found.columns.size(), expected.columns.size());
      for (std::size_t i = 0; i < std::min(found.bad.size(), expected.bad.size()); ++i)
        CHECK(found.bad[i].index == expected.bad[i].index && found.bad[i].reason == expected.bad[i].reason);
      for (std::size_t i = 0; i < std::min(found.columns.size(), expected.columns.size()); ++i) {
        const ParsedColumn &a = found.columns[i], &b = expected.columns[i];
        CHECK(a.name == b.name && a.type == b.type && a.splits == b.splits && a.ints == b.ints &&
              a.floats == b.floats);
      }
    }
  }
}

// Found by fuzzing: alone, such a record is malformed; behind others it is of the wrong type as well.
void the_reason_does_not_depend_on_tasks_either() {
  const Bytes good = tf(entry("a", message(3, packed_ints({1}))));
  const Bytes bad = tf(entry("a", message(2, packed_floats({1})))) + "\x0a\x7f";
  for (const std::size_t task_bytes : {1, 1000}) {
    const auto parsed =
        ExampleParser(ExampleKind::kTfExample, std::nullopt, nullptr, task_bytes).parse(views({good, bad}));
    CHECK(parsed.bad.size() == 1 && parsed.bad[0].reason.find("wrong type") == 0);
  }
}

void too_many_columns_are_refused() {
  std::vector<Bytes> payloads;
  for (int i = 0; i < 20000; ++i)
    payloads.push_back(tf(entry(std::to_string(i), message(3, packed_ints({1})))));
  CHECK_THROWS(std::length_error, "20000 columns of 20000 records", parse(ExampleKind::kTfExample, payloads));
}

void tfrecords_and_frames_split_where_they_were_joined() {
  const Bytes data = "abcdef";
  const Ints splits{0, 3, 3, 6};
  const auto bytes = std::as_bytes(std::span(data));
  const auto records = seal_records(bytes, splits);
  auto split = split_records(records);
  CHECK(split.failure.empty() && split.consumed == records.size());
  CHECK(split.lengths == Ints({3, 0, 3}) && split.offsets == Ints({12, 31, 47}) &&
        split.starts == Ints({0, 19, 35}));
  for (std::size_t size = 0; size < records.size(); ++size) {
    split = split_records(std::span(records).first(size));
    CHECK(split.consumed == size || (split.truncated && !split.failure.empty()));
  }
  auto damaged = records;
  damaged[40] ^= std::byte{1};
  split = split_records(damaged);
  CHECK(!split.truncated && split.failure == "bad length checksum" && split.consumed == 35);

  for (int choice = 0; choice < 9; ++choice) {
    const FrameHeader header{choice == 8, (choice & 1) != 0, (choice & 2) != 0, (choice & 4) != 0};
    const Ints tags = choice == 8 ? Ints{0x1234567800, 1, -1} : Ints{};
    const auto frames = seal_frames(bytes, splits, header, tags);
    split = split_frames(frames, header);
    CHECK(split.failure.empty() && split.lengths == Ints({3, 0, 3}) && split.headers == tags);
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(std::memcmp(frames.data() + split.offsets[i], data.data() + splits[i], split.lengths[i]) == 0);
    for (std::size_t size = 0; size < frames.size(); ++size) {
      split = split_frames(std::span(frames).first(size), header);
      CHECK(split.consumed == size || split.truncated);
    }
  }
}

void a_sort_id_is_passed_over_whoever_gave_its_size() {
  const Bytes payload = raw(std::uint64_t{2}) + "ok";
  const FrameHeader header{false, true, true, true};
  const Bytes with_prefix = raw(std::uint64_t{3}) + "id!" + raw(std::uint64_t{0}) + payload;
  const Bytes without = raw(std::uint64_t{0}) + raw(std::uint64_t{9}) + raw(std::uint64_t{4}) + "id!!" +
                        raw(std::uint64_t{0}) + payload;
  const Bytes both = with_prefix + without;
  const auto split = split_frames(std::as_bytes(std::span(both)), header);
  CHECK(split.failure.empty() && split.lengths == Ints({2, 2}));
  const Bytes invalid = raw(std::uint64_t{0xfefefefe});
  CHECK(split_frames(std::as_bytes(std::span(invalid)), {}).failure.find("0xfefefefe") != std::string::npos);
  const Bytes huge = raw(~std::uint64_t{0});
  CHECK(!split_frames(std::as_bytes(std::span(huge)), {}).truncated);
}

void speed() {
  const Sample sample(4096);
  for (const ExampleKind kind : kRowKinds) {
    const auto encoded =
        encode_examples(kind, sample.records, sample.columns(kind != ExampleKind::kTfExample));
    const auto payloads = payloads_of(encoded);
    const ExampleParser parser(kind);
    const auto start = std::chrono::steady_clock::now();
    constexpr int kTimes = 20;
    for (int i = 0; i < kTimes; ++i) CHECK(parser.parse(payloads).bad.empty());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::cout << "  kind " << static_cast<int>(kind) << ": " << kTimes * sample.records / seconds / 1e6
              << " M records/s, " << kTimes * encoded.data.size() / seconds / 1e6 << " MB/s\n";
  }
}

}  // namespace

int main() {
  return monolith::check::run({
      {"a tf.Example becomes columns", a_tf_example_becomes_columns},
      {"repeated values may come one by one", repeated_values_may_come_one_by_one},
      {"a name may follow its value and a value come in pieces",
       a_name_may_follow_its_value_and_a_value_come_in_pieces},
      {"of a key that comes twice the last counts", of_a_key_that_comes_twice_the_last_counts},
      {"a feature of another type than before makes its record bad",
       a_feature_of_another_type_than_before_makes_its_record_bad},
      {"a column without values is of the type of its lists",
       a_column_without_values_is_of_the_type_of_its_lists},
      {"only wanted columns are read", only_wanted_columns_are_read},
      {"every member of a feature is read", every_member_of_a_feature_is_read},
      {"labels, weight and line id are lifted from fields and from features",
       labels_weight_and_line_id_are_lifted_from_fields_and_from_features},
      {"an instance has its ids by slot", an_instance_has_its_ids_by_slot},
      {"a batch has its records by column and shares what is shared",
       a_batch_has_its_records_by_column_and_shares_what_is_shared},
      {"batches that make no sense are bad", batches_that_make_no_sense_are_bad},
      {"malformed payloads are named and the others kept", malformed_payloads_are_named_and_the_others_kept},
      {"what is written reads the same", what_is_written_reads_the_same},
      {"columns that fit no field are refused", columns_that_fit_no_field_are_refused},
      {"every truncation is bad or a shorter record", every_truncation_is_bad_or_a_shorter_record},
      {"threads and tasks make no difference", threads_and_tasks_make_no_difference},
      {"the reason does not depend on tasks either", the_reason_does_not_depend_on_tasks_either},
      {"too many columns are refused", too_many_columns_are_refused},
      {"tfrecords and frames split where they were joined",
       tfrecords_and_frames_split_where_they_were_joined},
      {"a sort id is passed over, whoever gave its size", a_sort_id_is_passed_over_whoever_gave_its_size},
      {"speed", speed},
  });
}
