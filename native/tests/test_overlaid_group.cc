#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "frozen_files.h"
#include "hash.h"
#include "overlaid_group.h"

namespace {

using namespace monolith;
using namespace monolith::check;

constexpr FrozenCoding kFp32 = FrozenCoding::kFp32;

std::shared_ptr<const FrozenTable> frozen(const Segments& segments, const Ids& ids, const Floats& values) {
  return write(segments, ids, values).open();
}

std::shared_ptr<Table> over(std::uint32_t dim) {
  TableSpec spec;
  spec.segments.resize(1);
  spec.segments[0].dim = static_cast<int>(dim);
  return std::make_shared<Table>(spec);
}

Floats read(const OverlaidGroup& group, const Ids& ids, const Ids& sizes, std::size_t floats,
            std::size_t batches = 1) {
  Floats out(floats, -1);
  group.lookup(ids, sizes, batches, out);
  return out;
}

void what_is_above_counts_and_the_rest_is_read_below() {
  const auto first = over(2), second = over(1);
  const OverlaidGroup group(
      {frozen({{2, kFp32}}, {1, 2}, {1, 2, 3, 4}), frozen({{1, kFp32}}, {1, 5}, {7, 8})}, {first, second});
  CHECK(read(group, {1, 2, 5}, {2, 1}, 5) == (Floats{1, 2, 3, 4, 8}));
  first->assign(Ids{2, 9}, Floats{5, 6, 7, 8}.data(), {});
  second->assign(Ids{5}, Floats{0}.data(), {1});  // gone
  CHECK(read(group, {9, 1, 2, 3, 5, 1}, {4, 2}, 10) == (Floats{7, 8, 1, 2, 5, 6, 0, 0, 0, 7}));
  CHECK(read(group, {2, 5, 9, 5}, {1, 1, 1, 1}, 6, 2) == (Floats{5, 6, 0, 7, 8, 0}));
  CHECK(read(group, {2, 9}, {2, 0}, 4) == (Floats{5, 6, 7, 8}));
  CHECK(read(group, {}, {0, 0}, 0).empty());
}

void widths_and_sizes_must_fit() {
  const auto below = frozen({{2, kFp32}}, {1}, {1, 2});
  CHECK_THROWS(std::invalid_argument, "other widths", OverlaidGroup({below}, {over(3)}));
  CHECK_THROWS(std::invalid_argument, "one below and one above", OverlaidGroup({below}, {}));
  const OverlaidGroup group({below}, {over(2)});
  CHECK_THROWS(std::invalid_argument, "", read(group, {1}, {2}, 2));
  CHECK_THROWS(std::invalid_argument, "out must hold", read(group, {1}, {1}, 3));
}

void a_row_is_read_whole_while_it_is_replaced() {
  constexpr std::size_t kDim = 16, kRows = 300;
  Ids ids(kRows);
  for (std::size_t i = 0; i < kRows; ++i) ids[i] = static_cast<std::int64_t>(i);
  const auto above = over(kDim);
  const OverlaidGroup group({frozen({{kDim, kFp32}}, ids, Floats(kRows * kDim, 0))}, {above});
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int round = 1; round <= 300; ++round)
      above->assign(ids, Floats(kRows * kDim, static_cast<float>(round)).data(), {});
    done = true;
  });
  bool whole = true;
  while (!done) {
    const Floats rows = read(group, ids, {kRows}, kRows * kDim);
    for (std::size_t i = 0; i < rows.size(); ++i) whole = whole && rows[i] == rows[i / kDim * kDim];
  }
  writer.join();
  CHECK(whole);
  CHECK_EQUAL(read(group, {7}, {1}, kDim)[0], 300.0f);
}

void a_scan_finds_the_rows_of_a_range_of_hashes() {
  Ids ids(5'000);
  Floats values(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int64_t>(i * 7919);
    values[i] = static_cast<float>(i);
  }
  const auto table = frozen({{1, kFp32}}, ids, values);
  std::size_t met = 0;
  for (std::uint64_t bucket = 0; bucket < 16; ++bucket) {
    const auto found = table->scan(bucket << 60, (bucket << 60) + ((std::uint64_t{1} << 60) - 1));
    met += found.ids.size();
    for (std::size_t i = 0; i < found.ids.size(); ++i) {
      CHECK_EQUAL(mix(found.ids[i]) >> 60, bucket);
      CHECK_EQUAL(found.values[i], static_cast<float>(found.ids[i] / 7919));
    }
  }
  CHECK_EQUAL(met, ids.size());
  CHECK_EQUAL(table->scan(0, ~std::uint64_t{0}).ids.size(), ids.size());
  CHECK(table->scan(1, 0).ids.empty());
}

void values_match_a_row_that_they_would_be_written_as() {
  for (const auto coding : {FrozenCoding::kFp32, FrozenCoding::kFp16, FrozenCoding::kInt8}) {
    const auto table = frozen({{2, coding}}, {3, 4}, {0.1f, 0.2f, 0.3f, 0.4f});
    std::vector<std::uint8_t> same(4);
    table->matches(Ids{3, 4, 4, 5}, Floats{0.1f, 0.2f, 0.3f, 0.4f, 0.35f, 0.4f, 0, 0}.data(), same.data());
    CHECK(same == (std::vector<std::uint8_t>{1, 1, 0, 0}));
    std::vector<std::uint8_t> there(2);
    table->contains(Ids{4, 5}, there.data());
    CHECK(there == (std::vector<std::uint8_t>{1, 0}));
  }
}

}  // namespace

int main() {
  return monolith::check::run({
      {"what is above counts and the rest is read below", what_is_above_counts_and_the_rest_is_read_below},
      {"widths and sizes must fit", widths_and_sizes_must_fit},
      {"a row is read whole while it is replaced", a_row_is_read_whole_while_it_is_replaced},
      {"a scan finds the rows of a range of hashes", a_scan_finds_the_rows_of_a_range_of_hashes},
      {"values match a row that they would be written as", values_match_a_row_that_they_would_be_written_as},
  });
}
