// Fuzzing of whatever reads records: any bytes at all must give an answer, and a sound one.
//
// `make fuzz` builds this with gcc, whose coverage hook guides the loop at the end of this file. clang's
// libFuzzer takes the same entry point:
//
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -DMONOLITH_LIBFUZZER -Inative/src
//         native/tests/fuzz_example_parser.cc
//         native/src/{example_*,csv_parser,entry_dump,frames,tfrecord,checksum,workers}.cc
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "csv_parser.h"
#include "entry_dump.h"
#include "example_parser.h"
#include "example_writer.h"
#include "frames.h"
#include "tfrecord.h"

namespace {

using namespace monolith;
using Bytes = std::vector<std::byte>;

// A crash leaves its input behind, in `last_input`.
std::span<const std::uint8_t> current;

void save_input() {
  std::ofstream("last_input", std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()), static_cast<std::streamsize>(current.size()));
}

void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: broken: %s\n", what);
  save_input();
  std::abort();
}

bool rises(std::span<const std::int64_t> splits, std::size_t end) {
  return !splits.empty() && splits.front() == 0 && splits.back() == static_cast<std::int64_t>(end) &&
         std::is_sorted(splits.begin(), splits.end());
}

bool same(const ParsedExamples& a, const ParsedExamples& b) {
  const auto bits = [](const std::vector<float>& floats) {
    const auto bytes = std::as_bytes(std::span(floats));
    return Bytes(bytes.begin(), bytes.end());
  };
  return a.records == b.records &&
         std::ranges::equal(a.bad, b.bad,
                            [](const BadPayload& x, const BadPayload& y) {
                              return x.index == y.index && x.reason == y.reason;
                            }) &&
         std::ranges::equal(a.columns, b.columns, [&](const ParsedColumn& x, const ParsedColumn& y) {
           return x.name == y.name && x.type == y.type && x.shared == y.shared && x.splits == y.splits &&
                  x.ints == y.ints && bits(x.floats) == bits(y.floats) && x.bytes == y.bytes &&
                  x.inner == y.inner;
         });
}

void check_sound(const ParsedExamples& parsed, std::size_t payloads) {
  for (const BadPayload& bad : parsed.bad) must(bad.index < payloads && !bad.reason.empty(), "bad payloads");
  for (const ParsedColumn& column : parsed.columns) {
    must(column.splits.size() == (column.shared ? 1 : parsed.records) + 1, "number of rows");
    const std::size_t values = column.type == ColumnType::kInt64   ? column.ints.size()
                               : column.type == ColumnType::kFloat ? column.floats.size()
                                                                   : column.inner.size() - 1;
    must(rises(column.splits, values), "row splits");
    if (column.type == ColumnType::kBytes) must(rises(column.inner, column.bytes.size()), "string splits");
  }
}

// What was read can be written, and then reads the same, but for columns without values.
void check_round_trip(ExampleKind kind, const ExampleParser& parser, ParsedExamples parsed) {
  std::erase_if(parsed.columns, [](const ParsedColumn& column) { return column.splits.back() == 0; });
  parsed.bad.clear();
  std::vector<ColumnView> views;
  for (const ParsedColumn& column : parsed.columns)
    views.push_back({column.name, column.type, column.shared, false, column.splits, column.ints,
                     column.floats, column.bytes, column.inner});
  EncodedExamples encoded;
  try {
    encoded = encode_examples(kind, parsed.records, views);
  } catch (const std::invalid_argument&) {
    return;  // a label of strings, say: it can be read, as a feature, and has no place to go to
  }
  std::vector<Payload> payloads;
  for (std::size_t i = 0; i + 1 < encoded.splits.size(); ++i)
    payloads.push_back(std::span<const std::byte>(encoded.data)
                           .subspan(encoded.splits[i], encoded.splits[i + 1] - encoded.splits[i]));
  const ParsedExamples again =
      kind == ExampleKind::kExampleBatch ? parser.parse_batches(payloads).at(0) : parser.parse(payloads);
  must(same(again, parsed), "written and read again");
}

void read_examples(std::uint8_t choice, std::span<const std::byte> bytes) {
  static const auto workers = std::make_shared<Workers>(2);
  const auto kind = static_cast<ExampleKind>(choice & 3);
  std::optional<std::vector<std::string>> wanted;
  if (choice & 4) wanted = {{"a", "label", "line_id.uid", "fc_slot_1", "line_id.actions"}};
  // Payloads of their own memory, so that one byte too far is out of bounds. 0xff ends one.
  std::vector<Bytes> held(1);
  for (const std::byte byte : bytes) {
    if ((choice & 8) != 0 && byte == std::byte{0xff})
      held.emplace_back();
    else
      held.back().push_back(byte);
  }
  std::vector<Payload> payloads;
  for (Bytes& payload : held) {
    payload.shrink_to_fit();
    payloads.push_back(payload);
  }
  const ExampleParser parser(kind, wanted);
  if (kind == ExampleKind::kExampleBatch) {
    for (const ParsedExamples& parsed : parser.parse_batches(payloads)) {
      check_sound(parsed, 1);
      if (parsed.bad.empty()) check_round_trip(kind, parser, parsed);
    }
    return;
  }
  const ParsedExamples parsed = parser.parse(payloads);
  check_sound(parsed, payloads.size());
  must(parsed.records + parsed.bad.size() == payloads.size(), "a payload is a record, or bad");
  const ExampleParser many(kind, wanted, (choice & 16) != 0 ? workers : nullptr, 1);
  must(same(many.parse(payloads), parsed), "tasks of one record make no difference");
  check_round_trip(kind, parser, parsed);
}

void split_streams(std::uint8_t choice, std::span<const std::byte> bytes) {
  const Bytes held(bytes.begin(), bytes.end());
  const FrameHeader header{(choice & 1) != 0, (choice & 2) != 0, (choice & 4) != 0, (choice & 8) != 0};
  for (const SplitStream& split : {split_records(held), split_frames(held, header)}) {
    must(split.consumed <= held.size() && (split.consumed < held.size()) == !split.failure.empty(),
         "splitting goes on to the end or says why not");
    for (std::size_t i = 0; i < split.offsets.size(); ++i)
      must(split.starts[i] <= split.offsets[i] && split.lengths[i] >= 0 &&
               static_cast<std::size_t>(split.offsets[i] + split.lengths[i]) <= split.consumed,
           "payloads lie in the buffer");
  }
}

// All records of a file, in chunks, from memory of its own that grows by `step` bytes.
std::vector<ParsedCsv> read_csv(const CsvParser& parser, std::span<const std::byte> bytes, std::size_t step,
                                std::size_t chunk_bytes) {
  std::vector<ParsedCsv> chunks;
  for (std::size_t begin = 0, end = 0;;) {
    const std::vector<char> held(reinterpret_cast<const char*>(bytes.data()) + begin,
                                 reinterpret_cast<const char*>(bytes.data()) + end);
    ParsedCsv parsed = parser.parse({held.data(), held.size()}, end == bytes.size(), chunk_bytes);
    must(parsed.next <= held.size(), "csv goes on within what it saw");
    must(parsed.whole || end < bytes.size(), "csv asks for no more than there is");
    if (parsed.whole && parsed.records == 0 && parsed.bad.empty()) return chunks;
    begin += parsed.next;
    if (!parsed.whole) {
      end = std::min(end + step, bytes.size());
      continue;
    }
    check_sound({parsed.records, parsed.columns, {}}, 0);
    for (const BadCsvRecord& bad : parsed.bad)
      must(bad.size > 0 && bad.size <= held.size() && bad.begin <= held.size() - bad.size &&
               !bad.reason.empty(),
           "bad records of csv");
    chunks.push_back(std::move(parsed));
  }
}

void read_csvs(std::uint8_t choice, std::span<const std::byte> bytes) {
  const CsvDialect dialect((choice & 1) != 0 ? '\t' : ',',
                           (choice & 2) != 0 ? std::optional('|') : std::nullopt,
                           (choice & 4) != 0 ? 10 : 1 << 20);
  std::vector<CsvColumn> columns{{0, ColumnType::kInt64}, {1, ColumnType::kFloat}, {2, ColumnType::kBytes}};
  if ((choice & 8) != 0) columns.erase(columns.begin());
  const CsvParser parser(dialect, 3, columns);
  const auto summed = [&](const std::vector<ParsedCsv>& chunks) {
    std::array<std::size_t, 4> sums{};
    for (const ParsedCsv& chunk : chunks) {
      sums[0] += chunk.records;
      sums[1] += chunk.bad.size();
      for (const BadCsvRecord& bad : chunk.bad) sums[2] += bad.size;
      for (const ParsedColumn& column : chunk.columns)
        sums[3] += column.ints.size() + 3 * column.floats.size() + 7 * column.bytes.size();
    }
    return sums;
  };
  const auto whole = summed(read_csv(parser, bytes, bytes.size(), bytes.size() + 1));
  must(summed(read_csv(parser, bytes, 1 + bytes.size() / 16, (choice & 16) != 0 ? 1 : 20)) == whole,
       "pieces make no difference");
  CsvSniffer sniffer(dialect, 3, 4);
  const std::size_t seen = sniffer.take({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, true);
  must(seen <= bytes.size() && (sniffer.done() || seen == bytes.size()), "sniffing");
}

const EntryDumpCodec& codec() {
  static const EntryDumpCodec made({{OptimizerKind::kAdagrad, 2},
                                    {OptimizerKind::kAdam, 1},
                                    {OptimizerKind::kFtrl, 1},
                                    {OptimizerKind::kBatchSoftmax, 1},
                                    {OptimizerKind::kSgd, 1}});
  return made;
}

// Entries as they are, and as records with the right checksums: without those nothing behind them is reached.
void read_entries(std::uint8_t choice, std::span<const std::byte> bytes) {
  Bytes held(bytes.begin(), bytes.end());
  if ((choice & 1) == 0) {
    const std::vector<std::int64_t> whole{0, static_cast<std::int64_t>(bytes.size())};
    held = seal_records(bytes, whole);
  }
  held.shrink_to_fit();
  const DecodedEntries read = codec().decode(held);
  must(read.consumed <= held.size() && (read.consumed < held.size()) == read.failure.has_value(),
       "entries go on to the end or say why not");
  must(read.dim == codec().dim() && read.state_dim == codec().state_dim(), "entries have their width");
  must(read.values.size() == read.ids.size() * read.dim &&
           read.state.size() == read.ids.size() * read.state_dim &&
           read.event_times.size() == read.ids.size() && read.state_missing.size() == read.ids.size(),
       "entries have all columns");
  if (read.ids.empty()) return;
  const EntryColumns rows{read.ids, read.event_times, read.values, read.state};
  Bytes again(codec().encoded_size(rows));
  codec().encode(rows, again);
  const DecodedEntries second = codec().decode(again);
  must(!second.failure && second.ids == read.ids && second.event_times == read.event_times,
       "entries written and read again");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  if ((data[0] & 0xe0) == 0xe0)
    split_streams(data[0], bytes);
  else if ((data[0] & 0xe0) == 0xc0)
    read_csvs(data[0], bytes);
  else if ((data[0] & 0xe0) == 0xa0)
    read_entries(data[0], bytes);
  else
    read_examples(data[0], bytes);
  return 0;
}

#ifndef MONOLITH_LIBFUZZER

// What gcc calls in every block of code that is compiled with -fsanitize-coverage=trace-pc. This file is not.
namespace {
constexpr std::size_t kPlaces = 1 << 16;
std::array<std::uint8_t, kPlaces> hits;  // by step from one block to the next
thread_local std::uintptr_t before = 0;
}  // namespace

extern "C" void __sanitizer_set_death_callback(void (*callback)());

extern "C" __attribute__((no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc() {
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  std::uint8_t& count = hits[(here ^ before) % kPlaces];
  if (count < 255) ++count;
  before = here >> 1;
}

namespace {

using Input = std::vector<std::uint8_t>;

class Fuzzer {
 public:
  explicit Fuzzer(std::uint64_t seed) : random_(seed) {}

  void add(Input input) { run(std::move(input), true); }

  void step() {
    Input input = corpus_[random_() % corpus_.size()];
    for (auto times = std::size_t{1} << random_() % 5; times > 0; --times) mutate(input);
    if (input.size() > 4096) input.resize(4096);
    run(std::move(input), false);
  }

  std::size_t runs() const { return runs_; }
  std::size_t corpus() const { return corpus_.size(); }
  std::size_t places() const { return kPlaces - std::count(seen_.begin(), seen_.end(), std::uint8_t{0}); }

 private:
  // How often a step was made counts by order of magnitude.
  static std::uint8_t magnitude(std::uint8_t count) {
    return count == 0 ? 0 : static_cast<std::uint8_t>(1u << std::min(7, std::bit_width(count) - 1));
  }

  void run(Input input, bool keep) {
    hits.fill(0);
    before = 0;
    current = input;
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++runs_;
    for (std::size_t i = 0; i < kPlaces; ++i) {
      std::uint64_t eight = 0;
      if (i % 8 == 0) std::memcpy(&eight, hits.data() + i, sizeof eight);
      if (i % 8 == 0 && eight == 0) {
        i += 7;  // as most are
        continue;
      }
      const std::uint8_t size = magnitude(hits[i]);
      if ((seen_[i] | size) == seen_[i]) continue;
      seen_[i] |= size;
      keep = true;
    }
    if (keep) corpus_.push_back(std::move(input));
  }

  void mutate(Input& input) {
    static constexpr std::uint64_t kNumbers[] = {0,
                                                 1,
                                                 2,
                                                 7,
                                                 8,
                                                 9,
                                                 0x7f,
                                                 0x80,
                                                 0xff,
                                                 0x7fff,
                                                 0xffff,
                                                 0x7fffffff,
                                                 0xffffffff,
                                                 0xfefefefe,
                                                 0x7fffffffffffffff,
                                                 0xffffffffffffffff};
    if (input.size() < 2) input.resize(2 + random_() % 8);
    const std::size_t at = random_() % input.size();
    switch (random_() % 9) {
      case 0:
        input[at] = static_cast<std::uint8_t>(random_());
        break;
      case 1:
        input[at] ^= static_cast<std::uint8_t>(1u << random_() % 8);
        break;
      case 2:
        input[at] = static_cast<std::uint8_t>(input[at] + random_() % 17 - 8);
        break;
      case 3:
        input.erase(input.begin() + at, input.begin() + std::min(at + 1 + random_() % 16, input.size()));
        break;
      case 4:
        input.insert(input.begin() + at, static_cast<std::uint8_t>(random_()));
        break;
      case 5: {  // a field: its key, and a length or a number
        const std::uint8_t wires[] = {0, 1, 2, 2, 2, 5};
        const std::array<std::uint8_t, 2> field{
            static_cast<std::uint8_t>((1 + random_() % 16) << 3 | wires[random_() % 6]),
            static_cast<std::uint8_t>(random_() % 32)};
        input.insert(input.begin() + at, field.begin(), field.end());
        break;
      }
      case 6: {  // a telling number
        std::uint64_t number = kNumbers[random_() % std::size(kNumbers)];
        for (std::size_t i = at; i < std::min(input.size(), at + (std::size_t{1} << random_() % 4)); ++i) {
          input[i] = static_cast<std::uint8_t>(number);
          number >>= 8;
        }
        break;
      }
      case 7: {  // a stretch of another input, or of this one
        const Input from = corpus_[random_() % corpus_.size()];
        if (from.empty()) break;
        const std::size_t begin = random_() % from.size();
        const std::size_t end = std::min(from.size(), begin + 1 + random_() % 64);
        input.insert(input.begin() + at, from.begin() + begin, from.begin() + end);
        break;
      }
      default:
        input.resize(at);
    }
  }

  std::mt19937_64 random_;
  std::vector<Input> corpus_;
  std::array<std::uint8_t, kPlaces> seen_{};
  std::size_t runs_ = 0;
};

// A few whole messages of every kind, to begin with.
std::vector<Input> seeds() {
  const std::vector<std::int64_t> one{0, 1, 2}, two{0, 2, 3}, ints{5, -1}, more{1, 2, 1 << 20},
      inner{0, 2, 3};
  const std::vector<float> floats{0.5f, -1.f};
  const std::vector<std::uint8_t> text{'x', 'y', 'z'};
  const auto column = [&](std::string name, ColumnType type, bool ids = false) {
    ColumnView view{std::move(name), type, false, ids, one, {}, {}, {}, {}};
    if (type == ColumnType::kInt64) view.ints = ints;
    if (type == ColumnType::kFloat) view.floats = floats;
    if (type == ColumnType::kBytes) view.bytes = text, view.inner = inner;
    return view;
  };
  std::vector<Input> made;
  for (const ExampleKind kind :
       {ExampleKind::kTfExample, ExampleKind::kExample, ExampleKind::kInstance, ExampleKind::kExampleBatch}) {
    std::vector<ColumnView> columns{column("a", ColumnType::kInt64),
                                    column("fc_slot_1", ColumnType::kInt64, true),
                                    column("c", ColumnType::kBytes), column("label", ColumnType::kFloat),
                                    column("instance_weight", ColumnType::kFloat)};
    columns[0].splits = two, columns[0].ints = more;
    if (kind != ExampleKind::kTfExample) {
      columns.push_back(column("line_id.uid", ColumnType::kInt64));
      columns.push_back(column("line_id.actions", ColumnType::kInt64));
      columns.push_back(column("line_id.sample_rate", ColumnType::kFloat));
      columns.push_back(column("line_id.user_id", ColumnType::kBytes));
    }
    const EncodedExamples encoded = encode_examples(kind, 2, columns);
    for (const int choice : {0, 4, 8, 24}) {
      Input input{static_cast<std::uint8_t>(static_cast<int>(kind) | choice)};
      for (std::size_t i = 0; i + 1 < encoded.splits.size(); ++i) {
        if (i > 0 && (choice & 8) == 0) break;
        if (i > 0) input.push_back(0xff);
        for (auto at = encoded.splits[i]; at < encoded.splits[i + 1]; ++at)
          input.push_back(static_cast<std::uint8_t>(encoded.data[at]));
      }
      made.push_back(std::move(input));
    }
    const auto streams = {
        seal_records(encoded.data, encoded.splits),
        seal_frames(encoded.data, encoded.splits, FrameHeader{false, true, true, true}, {})};
    for (const Bytes& stream : streams) {
      Input input{0xee};
      for (const std::byte byte : stream) input.push_back(static_cast<std::uint8_t>(byte));
      made.push_back(std::move(input));
    }
  }
  for (const std::uint8_t choice : {0xc0, 0xc1, 0xc2, 0xc6, 0xd8}) {
    const char delimiter = (choice & 1) != 0 ? '\t' : ',';
    std::string text = "1,0.5,a\r\n-20|3,1e3|.5,\"b,\"\"c\nd\"\n\n,,\nx,inf,y\n18446744073709551615,-nan,\"e";
    std::ranges::replace(text, ',', delimiter);
    Input input{choice};
    input.insert(input.end(), text.begin(), text.end());
    made.push_back(std::move(input));
  }
  const std::vector<std::int64_t> ids{7, -1}, times{3, 1 << 20};
  const std::vector<float> values(2 * codec().dim(), 0.5f), state(2 * codec().state_dim(), 1.f);
  const EntryColumns rows{ids, times, values, state};
  std::vector<Bytes> messages;
  for (const std::size_t size : codec().message_sizes(rows)) messages.emplace_back(size);
  std::vector<std::span<std::byte>> outs(messages.begin(), messages.end());
  codec().encode_messages(rows, outs);
  Bytes dump(codec().encoded_size(rows));
  codec().encode(rows, dump);
  for (const auto& [choice, entry] : {std::pair{0xa0, messages[0]}, std::pair{0xa1, dump}}) {
    Input input{static_cast<std::uint8_t>(choice)};
    for (const std::byte byte : entry) input.push_back(static_cast<std::uint8_t>(byte));
    made.push_back(std::move(input));
  }
  // Ids of version 1 in an Instance, and every member of a Feature, empty and not.
  made.push_back({2, 0x0a, 8, 1, 0, 0, 0, 0, 0, 0x40, 0});
  for (std::uint8_t field = 1; field <= 16; ++field) {
    const bool scalar = field >= 12 && field <= 15;
    Input feature = scalar ? Input{static_cast<std::uint8_t>(field << 3), 1}
                           : Input{static_cast<std::uint8_t>(field << 3 | 2), 0};
    if (field == 16) feature = {0x82, 0x01, 4, 0x0a, 2, 0x0a, 0};
    Input input{1,   0x0a, static_cast<std::uint8_t>(5 + feature.size()), 0x0a, 1,
                'a', 0x12, static_cast<std::uint8_t>(feature.size())};
    input.insert(input.end(), feature.begin(), feature.end());
    made.push_back(std::move(input));
  }
  return made;
}

}  // namespace

// fuzz_example_parser [seconds] [seed], or a file to run once.
int main(int argc, char** argv) {
  if (argc > 1 && std::ifstream(argv[1]).good()) {
    std::ifstream file(argv[1], std::ios::binary);
    const Input input((std::istreambuf_iterator<char>(file)), {});
    current = input;
    return LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  __sanitizer_set_death_callback(save_input);
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  Fuzzer fuzzer(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()());
  for (Input& seed : seeds()) fuzzer.add(std::move(seed));
  std::printf("%zu seeds reach %zu places\n", fuzzer.corpus(), fuzzer.places());
  const auto start = std::chrono::steady_clock::now();
  double told = 0;
  for (double took = 0; took < seconds;) {
    for (int i = 0; i < 200; ++i) fuzzer.step();
    took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (took - told < 15 && took < seconds) continue;
    told = took;
    std::printf("%6.0f s: %zu runs, %zu inputs reach %zu places\n", took, fuzzer.runs(), fuzzer.corpus(),
                fuzzer.places());
    std::fflush(stdout);
  }
}

#endif
