#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cells.h"
#include "check.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;

// Texts, and rows of them.
struct Texts {
  std::string text;
  Ids splits{0}, rows{0};

  Texts& row(const std::vector<std::string>& texts) {
    for (const std::string& one : texts) {
      text += one;
      splits.push_back(static_cast<std::int64_t>(text.size()));
    }
    rows.push_back(static_cast<std::int64_t>(splits.size()) - 1);
    return *this;
  }
  TextColumn column() const { return {std::as_bytes(std::span(text)), splits, rows}; }
};

std::int64_t hash(std::string_view text) {
  return static_cast<std::int64_t>(hash_bytes(std::as_bytes(std::span(text))));
}

void each_item_is_hashed_as_its_text_alone() {
  const Texts texts = Texts().row({"ab|c", "d"}).row({}).row({"|ab||"}).row({""});
  const auto found = hash_cells(texts.column(), '|', {});
  CHECK(found.values == (Ids{hash("ab"), hash("c"), hash("d"), hash("ab")}));
  CHECK(found.splits == (Ids{0, 3, 3, 4, 4}));
  CHECK(found.bad.empty());
  CHECK(hash_cells(texts.column(), std::nullopt, {}).values == (Ids{hash("ab|c"), hash("d"), hash("|ab||")}));
}

void a_slot_makes_fids() {
  const auto found = hash_cells(Texts().row({"ab"}).column(), std::nullopt, {7});
  CHECK(found.values == (Ids{make_fid(2, 7, static_cast<std::uint64_t>(hash("ab")))}));
}

void numbers_are_read_and_rows_that_hold_others_named() {
  const Texts texts = Texts().row({"3| 9"}).row({"4|x|5"}).row({"-1"});
  const auto whole = read_whole_cells(texts.column(), '|');
  CHECK(whole.values == (Ids{3, 9, -1}));
  CHECK(whole.splits == (Ids{0, 2, 2, 3}));
  CHECK(whole.bad == (Ids{1}));
  CHECK(read_number_cells(Texts().row({"0.5|2"}).column(), '|').values == (std::vector<float>{0.5f, 2.0f}));
}

void a_cross_has_every_way_to_take_one_of_each() {
  const Ids left{1, 2, 3}, left_splits{0, 2, 3}, right{5, 6, 7}, right_splits{0, 2, 3};
  const std::vector<IdColumn> columns{{left, left_splits}, {right, right_splits}};
  const auto found = cross_cells(columns, 4, {});
  CHECK(found.splits == (Ids{0, 4, 5}));
  CHECK(std::vector(found.values) == cross_cells(columns, 4, {}).values);
  for (std::size_t one = 0; one < found.values.size(); ++one)
    for (std::size_t other = 0; other < one; ++other) CHECK(found.values[one] != found.values[other]);
  const auto few = cross_cells(columns, 3, {});
  CHECK(few.bad == (Ids{0}));
  CHECK(few.values == (Ids{found.values[4]}));
}

void features_are_packed_one_after_the_other() {
  const Texts texts = Texts().row({"ab"}).row({"c", "d"}), lists = Texts().row({"1|2"}).row({""});
  const Ids ints{7, 8}, rows{0, 0, 2};
  const std::vector<float> floats{0.5f, 2.0f};
  const Ids each{0, 1, 2};
  const std::vector<double> boundaries{0.5, 1.0};
  using Kind = RawIds::Kind;
  const std::vector<RawIds> features{
      {Kind::kHashed, texts.column(), {}, {}, {}, {}, std::nullopt, {}},
      {Kind::kWholeTexts, lists.column(), {}, {}, {}, {}, '|', {}},
      {Kind::kInts, {}, ints, {}, rows, {}, std::nullopt, {3}},
      {Kind::kFloatBuckets, {}, {}, floats, each, boundaries, std::nullopt, {}},
  };
  const PackedIds packed = pack_ids(features);
  CHECK(packed.fine);
  CHECK(packed.ids ==
        (Ids{hash("ab"), hash("c"), hash("d"), 1, 2, make_fid(2, 3, 7), make_fid(2, 3, 8), 1, 2}));
  CHECK(packed.splits == (Ids{0, 1, 3, 5, 5, 5, 7, 8, 9}));
  const Texts word = Texts().row({"x"});
  CHECK(!pack_ids(std::vector<RawIds>{{Kind::kWholeTexts, word.column(), {}, {}, {}, {}, {}, {}}}).fine);
}

void texts_of_any_length_are_hashed_as_they_are_alone() {
  const std::string letters = "abcdefghijklmnopqrstuvwxyz";
  for (const std::size_t longest : {7u, 16u, 26u}) {
    Texts texts;
    Ids alone, splits{0};
    for (std::size_t size = longest - 6; size <= longest; ++size) {
      texts.row({letters.substr(0, size)});
      alone.push_back(hash(letters.substr(0, size)));
      splits.push_back(static_cast<std::int64_t>(alone.size()));
    }
    using Kind = RawIds::Kind;
    const PackedIds packed =
        pack_ids(std::vector<RawIds>{{Kind::kHashed, texts.column(), {}, {}, {}, {}, std::nullopt, {}}});
    CHECK(packed.fine);
    CHECK(packed.ids == alone);
    CHECK(packed.splits == splits);
  }
}

void numbers_are_packed_where_each_row_has_one() {
  const std::vector<float> floats{0.5f, 2.0f}, infinite{0.5f, INFINITY};
  const Ids ints{7, 8}, each{0, 1, 2}, none{0, 0, 2};
  std::vector<float> out(4);
  CHECK(pack_numbers(std::vector<RawNumbers>{{{}, floats, each}, {ints, {}, each}}, 2, out));
  CHECK(out == (std::vector<float>{0.5f, 2, 7, 8}));
  out.resize(2);
  CHECK(!pack_numbers(std::vector<RawNumbers>{{{}, floats, none}}, 2, out));
  CHECK(!pack_numbers(std::vector<RawNumbers>{{{}, infinite, each}}, 2, out));
}

void splits_that_do_not_fit_are_refused() {
  const std::string text = "abc";
  const Ids beyond{0, 4}, falling{2, 1}, rows{0, 1}, fine{0, 3}, many{0, 2};
  const auto bytes = std::as_bytes(std::span(text));
  CHECK_THROWS(std::invalid_argument, "splits", hash_cells({bytes, beyond, rows}, std::nullopt, {}));
  CHECK_THROWS(std::invalid_argument, "splits", hash_cells({bytes, falling, rows}, std::nullopt, {}));
  CHECK_THROWS(std::invalid_argument, "splits", hash_cells({bytes, fine, many}, std::nullopt, {}));
  CHECK_THROWS(std::invalid_argument, "splits", hash_cells({bytes, {}, rows}, std::nullopt, {}));
}

}  // namespace

int main() {
  return check::run({
      {"each item is hashed as its text alone", each_item_is_hashed_as_its_text_alone},
      {"a slot makes fids", a_slot_makes_fids},
      {"numbers are read, and rows that hold others named", numbers_are_read_and_rows_that_hold_others_named},
      {"a cross has every way to take one of each", a_cross_has_every_way_to_take_one_of_each},
      {"features are packed one after the other", features_are_packed_one_after_the_other},
      {"texts of any length are hashed as they are alone", texts_of_any_length_are_hashed_as_they_are_alone},
      {"numbers are packed where each row has one", numbers_are_packed_where_each_row_has_one},
      {"splits that do not fit are refused", splits_that_do_not_fit_are_refused},
  });
}
