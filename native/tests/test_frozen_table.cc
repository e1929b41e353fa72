#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "checksum.h"
#include "frozen_files.h"

namespace {

using namespace monolith;
using namespace monolith::check;

constexpr FrozenCoding kFp32 = FrozenCoding::kFp32, kFp16 = FrozenCoding::kFp16, kInt8 = FrozenCoding::kInt8,
                       kInt4 = FrozenCoding::kInt4;

Floats read(const FrozenTable& table, const Ids& ids) {
  Floats out(ids.size() * table.dim(), -1);
  table.lookup(ids, out.data());
  return out;
}

void an_id_reads_its_row_and_an_unknown_one_zeros() {
  const auto table = write({{2, kFp32}}, {7, -8}, {1, 2, 3, 4}).open();
  CHECK(read(*table, {-8, 9, 7, 7}) == (Floats{3, 4, 0, 0, 1, 2, 1, 2}));
  CHECK_EQUAL(table->rows(), 2u);
  CHECK_EQUAL(table->name(), "item");
}

void a_table_may_be_empty() {
  const auto table = write({{3, kInt8}}, {}, {}).open();
  CHECK(read(*table, {0}) == (Floats{0, 0, 0}));
  CHECK(read(*table, {}).empty());
}

void many_ids_are_all_found_and_no_others() {
  std::mt19937_64 random(1);
  const std::size_t count = 50'000;
  Ids ids(count), unknown(count);
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) {
    ids[i] = static_cast<std::int64_t>(random());
    unknown[i] = static_cast<std::int64_t>(random());
    values[i] = static_cast<float>(i + 1);
  }
  const auto table = write({{1, kFp32}}, ids, values).open();
  CHECK(read(*table, ids) == values);
  CHECK(read(*table, unknown) == Floats(count, 0));
  table->verify(0, table->bytes());
  table->prefault(0, table->bytes());
}

void ids_of_one_bucket_go_on_to_the_next_and_round_the_end() {
  // All have the last bucket for their home.
  Ids ids;
  for (std::int64_t id = 0; ids.size() < 40; ++id)
    if (frozen_home(id, 12) == 11) ids.push_back(id);
  Floats values(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) values[i] = static_cast<float>(i + 1);
  const FrozenFile file = write({{1, kFp32}}, ids, values);
  CHECK_EQUAL(file.trailer().buckets, 12u);
  CHECK_EQUAL(file.trailer().longest, 8u);
  CHECK(read(*file.open(), ids) == values);
}

void codings_cost_what_the_writer_says() {
  const Segments segments{{1, kFp32}, {2, kFp16}, {3, kInt8}, {1, kFp16}};
  const Floats values{0.1f, 1e6f, 0.1f, 1, -127, 0.4f, 3};
  FrozenWriter writer(segments, "", 1);
  std::vector<std::byte> row(writer.row_bytes());
  writer.add(Ids{5}, values, row);
  CHECK_EQUAL(writer.row_bytes(), 4u + 4 + 7 + 2 + 3);
  CHECK_EQUAL(writer.largest_error(), 1e6 - 65504);
  const Floats got = read(*write(segments, {5}, values).open(), {5});
  CHECK(got[0] == 0.1f && got[1] == 65504 && std::abs(got[2] - 0.1f) < 1e-4f);
  CHECK(got[3] == 1 && got[4] == -127 && got[5] == 0 && got[6] == 3);
}

void small_and_large_values_survive_small_codes() {
  const float tiny = std::numeric_limits<float>::denorm_min(), huge = std::numeric_limits<float>::max();
  for (const FrozenCoding coding : {kInt8, kInt4}) {
    const auto table = write({{2, coding}}, {1, 2, 3}, {tiny, 0, huge, -huge, 0, 0}).open();
    const Floats got = read(*table, {1, 2, 3});
    CHECK(std::isfinite(got[0]) && got[1] == 0);
    CHECK(std::isfinite(got[2]) && got[2] > huge / 2 && got[3] == -got[2]);
    CHECK(got[4] == 0 && got[5] == 0);
  }
}

void what_cannot_be_written_is_refused() {
  CHECK_THROWS(std::invalid_argument, "segments", FrozenWriter({}, "", 0));
  CHECK_THROWS(std::invalid_argument, "dim", FrozenWriter({{0, kFp32}}, "", 0));
  CHECK_THROWS(std::invalid_argument, "at most", FrozenWriter({{1u << 21, kFp32}}, "", 0));
  CHECK_THROWS(std::invalid_argument, "shards", FrozenWriter({{1, kFp32}}, "", std::uint64_t{1} << 32));
  CHECK_THROWS(std::invalid_argument, "id 7 came twice", write({{1, kFp32}}, {7, 8, 7}, {1, 2, 3}));
  CHECK_THROWS(std::invalid_argument, "of id 8 is nan", write({{1, kFp32}}, {7, 8}, {1, NAN}));
  FrozenWriter writer({{1, kFp32}}, "", 1);
  std::vector<std::byte> out(8);
  CHECK_THROWS(std::invalid_argument, "the 1 that", writer.add(Ids{1, 2}, Floats{1, 2}, out));
  CHECK_THROWS(std::invalid_argument, "row_bytes", writer.add(Ids{1}, Floats{1}, out));
}

void every_cut_is_refused() {
  const FrozenFile whole = write({{2, kFp32}}, {7, -8}, {1, 2, 3, 4});
  for (std::size_t size = 0; size < whole.bytes.size(); ++size) {
    FrozenFile cut = whole;
    cut.bytes.resize(size);
    CHECK_THROWS(FrozenDamage, "", cut.open());
  }
  FrozenFile longer = whole;
  longer.bytes.resize(whole.bytes.size() + 64);
  CHECK_THROWS(FrozenDamage, "trailer", longer.open());
}

void every_flipped_byte_is_found() {
  const FrozenFile whole = write({{2, kFp16}, {1, kInt8}}, {7, -8}, {1, 2, 3, 4, 5, 6});
  for (std::size_t at = 0; at < whole.bytes.size(); ++at) {
    FrozenFile damaged = whole;
    damaged.bytes[at] ^= std::byte{0x10};
    CHECK_THROWS(FrozenDamage, "", {
      const auto table = damaged.open();
      table->verify(0, table->bytes());
    });
  }
}

// Whatever a trailer says under a checksum that fits, nothing outside of the file is read.
void a_hostile_trailer_is_refused_or_harmless() {
  const FrozenFile whole = write({{2, kFp32}, {1, kFp32}}, {7, -8}, {1, 2, 3, 4, 5, 6});
  const FrozenTrailer honest = whole.trailer();
  const std::uint64_t numbers[] = {0,
                                   1,
                                   2,
                                   63,
                                   64,
                                   65,
                                   128,
                                   1u << 20,
                                   UINT32_MAX,
                                   UINT64_MAX,
                                   UINT64_MAX - 63,
                                   std::uint64_t{1} << 58,
                                   std::uint64_t{1} << 63};
  const auto attempt = [&](FrozenTrailer trailer) {
    FrozenFile file = whole;
    file.put(trailer);
    try {
      const auto table = file.open();
      table->verify(0, table->bytes());
      CHECK_EQUAL(read(*table, {7, -8, 3}).size(), 3 * table->dim());
    } catch (const FrozenDamage&) {
    }
  };
  for (const std::uint64_t number : numbers) {
    for (std::uint64_t FrozenTrailer::* field :
         {&FrozenTrailer::rows, &FrozenTrailer::row_bytes, &FrozenTrailer::index_at, &FrozenTrailer::buckets,
          &FrozenTrailer::checksums_at, &FrozenTrailer::about_at, &FrozenTrailer::file_bytes}) {
      FrozenTrailer trailer = honest;
      trailer.*field = number;
      attempt(trailer);
    }
    for (std::uint32_t FrozenTrailer::* field : {&FrozenTrailer::segments, &FrozenTrailer::name_bytes,
                                                 &FrozenTrailer::longest, &FrozenTrailer::version}) {
      FrozenTrailer trailer = honest;
      trailer.*field = static_cast<std::uint32_t>(number);
      attempt(trailer);
    }
  }
}

void a_row_number_beyond_the_rows_is_an_error_of_the_lookup() {
  FrozenFile file = write({{2, kFp32}}, {7, -8}, {1, 2, 3, 4});
  const std::size_t at = file.trailer().index_at;
  FrozenBucket bucket;
  std::memcpy(&bucket, file.bytes.data() + at, sizeof bucket);
  for (auto& row : bucket.rows) row = 2;
  bucket.used = 255;
  bucket.passed = 255;
  std::memcpy(file.bytes.data() + at, &bucket, sizeof bucket);
  const auto table = file.open();
  CHECK_THROWS(FrozenDamage, "row 2 of 2", read(*table, {7}));
  CHECK(read(*table, {1}) == (Floats{0, 0}));
  CHECK_THROWS(FrozenDamage, "checksum", table->verify(0, 1));
}

void an_index_that_goes_round_in_circles_comes_to_an_end() {
  FrozenFile file = write({{1, kFp32}}, {7, 8, 9, 10}, {1, 2, 3, 4});
  FrozenTrailer trailer = file.trailer();
  CHECK_EQUAL(trailer.buckets, 2u);
  trailer.longest = 2;
  file.put(trailer);
  for (std::size_t bucket = 0; bucket < 2; ++bucket)
    file.bytes[trailer.index_at + 64 * bucket + offsetof(FrozenBucket, passed)] = std::byte{1};
  CHECK(read(*file.open(), {1, 7}) == (Floats{0, 1}));
}

void a_group_reads_each_piece_from_its_table() {
  const auto a = write({{1, kFp32}}, {1}, {5}).open();
  const auto b = write({{2, kFp16}}, {1, 2}, {6, 7, 8, 9}).open();
  for (const auto& workers : {std::shared_ptr<Workers>(), std::make_shared<Workers>(2)}) {
    const FrozenGroup group({a, b}, workers);
    Floats out(7, -1);
    group.lookup(Ids{1, 2, 1, 9, 2}, Ids{1, 1, 2, 1}, 2, out);
    CHECK(out == (Floats{5, 8, 9, 5, 0, 8, 9}));
    CHECK_THROWS(std::invalid_argument, "expected 7, got 6",
                 group.lookup(Ids{1, 2, 1, 9, 2}, Ids{1, 1, 2, 1}, 2, std::span(out).first(6)));
    group.lookup(Ids{}, Ids{0, 0}, 1, {});
  }
  CHECK_THROWS(std::invalid_argument, "tables", FrozenGroup({nullptr}));
}

void a_large_call_is_shared_among_threads() {
  const std::size_t count = 30'000;
  Ids ids(count);
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) {
    ids[i] = static_cast<std::int64_t>(i);
    values[i] = static_cast<float>(i);
  }
  const auto a = write({{1, kFp32}}, ids, values).open();
  const FrozenGroup group({a, a, a}, std::make_shared<Workers>(3));
  Ids three;
  Floats wanted, out(3 * count, -1);
  for (int i = 0; i < 3; ++i) {
    three.insert(three.end(), ids.begin(), ids.end());
    wanted.insert(wanted.end(), values.begin(), values.end());
  }
  const auto n = static_cast<std::int64_t>(count);
  group.lookup(three, Ids{n, n, n}, 1, out);
  CHECK(out == wanted);
}

// A file on disk, whose name is gone at once.
int descriptor_of(const FrozenFile& file) {
  std::string name = "/tmp/monolith-frozen-XXXXXX";
  const int descriptor = mkstemp(name.data());
  if (descriptor < 0) throw std::runtime_error("no temporary file");
  unlink(name.c_str());
  if (::write(descriptor, file.bytes.data(), file.bytes.size()) != static_cast<ssize_t>(file.bytes.size()))
    throw std::runtime_error("cannot write a temporary file");
  return descriptor;
}

void a_table_in_little_memory_reads_the_same_rows_in_any_thread() {
  const std::size_t count = 20'000;
  Ids ids(count);
  Floats values(count * 3);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::int64_t>(i * 3);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000);
  const FrozenFile file = write({{1, kFp32}, {2, kFp16}}, ids, values);
  const auto whole = file.open(), part = file.open();
  const int descriptor = descriptor_of(file);
  part->bound_memory(descriptor, 40'000, std::make_shared<BlockReader>(4));
  close(descriptor);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number)
    threads.emplace_back([&, number] {
      std::mt19937_64 random(static_cast<std::uint64_t>(number));
      for (int round = 0; round < 30; ++round) {
        Ids asked(700);
        for (auto& id : asked) id = static_cast<std::int64_t>(random() % 70'000);
        if (read(*part, asked) != read(*whole, asked)) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQUAL(wrong.load(), 0);
  const RowCache::Stats stats = part->cache_stats();
  CHECK(stats.found > stats.in_memory && stats.in_memory > 0 && stats.reads > 0);
  CHECK(stats.bytes <= part->index_bytes() + 40'000);
}

void rows_of_a_file_that_was_cut_are_an_error_of_the_lookup() {
  const std::size_t count = 5000;
  Ids ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::int64_t>(i);
  const FrozenFile file = write({{4, kFp32}}, ids, Floats(count * 4, 1));
  const auto table = file.open();
  const int descriptor = descriptor_of(file);
  table->bound_memory(descriptor, 1000, std::make_shared<BlockReader>(2));
  CHECK_EQUAL(ftruncate(descriptor, 4096), 0);
  close(descriptor);
  CHECK_THROWS(FrozenDamage, "ends too early", read(*table, ids));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"an id reads its row and an unknown one zeros", an_id_reads_its_row_and_an_unknown_one_zeros},
      {"a table may be empty", a_table_may_be_empty},
      {"many ids are all found and no others", many_ids_are_all_found_and_no_others},
      {"ids of one bucket go on to the next and round the end",
       ids_of_one_bucket_go_on_to_the_next_and_round_the_end},
      {"codings cost what the writer says", codings_cost_what_the_writer_says},
      {"small and large values survive small codes", small_and_large_values_survive_small_codes},
      {"what cannot be written is refused", what_cannot_be_written_is_refused},
      {"every cut is refused", every_cut_is_refused},
      {"every flipped byte is found", every_flipped_byte_is_found},
      {"a hostile trailer is refused or harmless", a_hostile_trailer_is_refused_or_harmless},
      {"a row number beyond the rows is an error of the lookup",
       a_row_number_beyond_the_rows_is_an_error_of_the_lookup},
      {"an index that goes round in circles comes to an end",
       an_index_that_goes_round_in_circles_comes_to_an_end},
      {"a group reads each piece from its table", a_group_reads_each_piece_from_its_table},
      {"a large call is shared among threads", a_large_call_is_shared_among_threads},
      {"a table in little memory reads the same rows in any thread",
       a_table_in_little_memory_reads_the_same_rows_in_any_thread},
      {"rows of a file that was cut are an error of the lookup",
       rows_of_a_file_that_was_cut_are_an_error_of_the_lookup},
  });
}
