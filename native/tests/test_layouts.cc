#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "distinct_ids.h"
#include "fid.h"
#include "hash.h"
#include "layouts.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;
using Bytes = std::vector<std::uint8_t>;

// One table of rows of two, a feature added up and one that keeps its first two ids; what is added up goes
// to output 0, the sequence to output 1.
Layouts two_features(std::shared_ptr<Workers> workers = nullptr) {
  return Layouts({2}, {{0, Pooling::kSum, 0}, {0, Pooling::kFirstN, 2}},
                 {{0, 0, 2, 0, 0, 0, false}, {1, 1, 1, 1, 0, 1, false}}, {2, 2}, std::move(workers));
}

std::unique_ptr<LayoutBatch> plan(const Layouts& layouts) {
  // Feature 0: {5, 6}, {5}; feature 1: {}, {6, 7, 8}.
  return layouts.plan(Ids{5, 6, 5, 6, 7, 8}, Ids{0, 2, 3, 3, 6}, Bytes{0, 0}, Ids{0, 1}, 2);
}

void distinct_ids_are_numbered_as_they_come() {
  const Layouts layouts = two_features();
  const auto batch = plan(layouts);
  CHECK(Ids(batch->ids().begin(), batch->ids().end()) == (Ids{5, 6, 7, 8}));
  CHECK(Ids(batch->counts().begin(), batch->counts().end()) == (Ids{2, 2, 1, 1}));
  CHECK_EQUAL(batch->floats(), 8u);
  Ids numbers(6, -1);
  layouts.number(*batch, numbers);
  CHECK(numbers == (Ids{0, 1, 0, 1, 2, 3}));
  CHECK_THROWS(std::invalid_argument, "expected 6, got 5",
               layouts.number(*batch, std::span(numbers).first(5)));
  CHECK(!batch->one_each());
  CHECK(layouts.plan(Ids{5, 6}, Ids{0, 1, 2}, Bytes{0, 0}, Ids{0, 1}, 1)->one_each());
  CHECK(layouts.plan(Ids{5, 6, 7}, Ids{0, 2, 3}, Bytes{0, 0}, Ids{-1, 1}, 1)->one_each());
}

void an_id_has_the_newest_time_of_the_examples_that_contain_it() {
  const Layouts layouts = two_features();
  Ids newest(4, -1);
  layouts.newest(*plan(layouts), Ids{90, 30}, newest);
  CHECK(newest == (Ids{90, 90, 30, 30}));
  layouts.newest(*plan(layouts), Ids{30, 90}, newest);
  CHECK(newest == (Ids{90, 90, 90, 90}));
  const auto shared = layouts.plan(Ids{5, 6, 7}, Ids{0, 1, 2, 3}, Bytes{1, 0}, Ids{0, 1}, 2);
  layouts.newest(*shared, Ids{90, 30}, std::span(newest).first(3));  // 5 is in both examples
  CHECK(newest == (Ids{90, 90, 30, 90}));
  CHECK_THROWS(std::invalid_argument, "expected 2 and 4, got 1 and 4",
               layouts.newest(*plan(layouts), Ids{90}, newest));
}

// Ids whose hashes are `first`, `first + step` and so on: a stretch of the rows of a table.
Ids ids_in_table_order(std::size_t count, std::uint64_t first, std::uint64_t step) {
  Ids ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(unmix(first + i * step + mix(i) % step));
  return ids;
}

double mean_probes(const Ids& ids) {
  Ids once(ids.size()), counts(ids.size());
  DistinctIds distinct(ids.size(), once.data(), counts.data());
  for (const std::int64_t id : ids) distinct.number(id);
  double probes = 0;
  for (const std::int64_t id : ids) probes += static_cast<double>(distinct.probes(id));
  return probes / static_cast<double>(ids.size());
}

void ids_in_the_order_of_a_table_are_found_as_fast_as_others() {
  constexpr std::size_t kCount = 8192;
  Ids random;
  for (std::size_t i = 0; i < kCount; ++i) random.push_back(static_cast<std::int64_t>(mix(mix(i) + 1)));
  CHECK(mean_probes(random) < 2);
  for (const std::uint64_t rows : {std::uint64_t{100'000}, std::uint64_t{10'000'000}, std::uint64_t{1} << 32})
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{5} << 60})
      CHECK(mean_probes(ids_in_table_order(kCount, first, UINT64_MAX / rows)) < 2);  // by high bits
  for (const int bits : {13, 20, 32}) {                                              // by low bits
    Ids ids;
    for (std::size_t i = 0; i < kCount; ++i) ids.push_back(unmix(mix(i + 1) >> bits << bits | 3));
    CHECK(mean_probes(ids) < 2);
  }
}

void outputs_are_gathered_and_gradients_scattered() {
  const Layouts layouts = two_features();
  const auto batch = plan(layouts);
  const Floats rows{1, 2, 10, 20, 100, 200, 1000, 2000};
  Floats sums(4), steps(4);
  layouts.gather(*batch, rows, std::vector<std::span<float>>{sums, steps});
  CHECK(sums == (Floats{11, 22, 1, 2}));
  CHECK(steps == (Floats{0, 0, 20, 200}));

  const Floats sum_gradients{1, 2, 3, 4}, step_gradients{5, 6, 7, 8};
  Floats out(8);
  layouts.scatter(*batch, {}, std::vector<std::span<const float>>{sum_gradients, step_gradients}, 2, out);
  CHECK(out == (Floats{8, 12, 2, 18, 0, 16, 0, 0}));
  layouts.scatter(*batch, {}, std::vector<std::span<const float>>{{}, step_gradients}, 1, out);
  CHECK(out == (Floats{0, 0, 0, 7, 0, 8, 0, 0}));
}

void weights_multiply_rows_and_their_gradients() {
  // Two examples with ids {1, 2} and {3}; a sum, and a mean of the same ids.
  const Layouts layouts({1}, {{0, Pooling::kSum, 0}, {0, Pooling::kMean, 0}},
                        {{0, 0, 1, 0, 0, 0}, {1, 0, 1, 1, 0, 0}}, {1, 1});
  const Ids ids{1, 2, 3, 1, 2, 3}, splits{0, 2, 3, 5, 6};
  const Floats weights{0.5f, 2.0f, 3.0f, 1.0f, 3.0f, 0.0f};
  const auto planned = layouts.plan(ids, splits, Bytes{0, 0}, Ids{0, 1}, 2, weights);
  const Floats rows{10, 20, 30};
  Floats sums(2), means(2);
  layouts.gather(*planned, rows, std::vector<std::span<float>>{sums, means});
  CHECK(sums == (Floats{45, 90}));
  CHECK(means == (Floats{17.5f, 0}));  // weights that sum up to nothing leave nothing
  const Floats ones{1, 1};
  Floats back(3);
  layouts.scatter(*planned, {}, std::vector<std::span<const float>>{ones, ones}, 1, back);
  CHECK(back == (Floats{0.75f, 2.75f, 3}));
  CHECK(layouts.moves(*planned, std::vector<int>{0, 1}).scale == (Floats{0.5f, 2, 3, 0.25f, 0.75f, 0}));
  CHECK_THROWS(std::invalid_argument, "one weight per id",
               layouts.plan(ids, splits, Bytes{0, 0}, Ids{0, 1}, 2, ones));
}

// Output 0 keeps each row of feature 0, columns 1 and 0 in that order; output 1 adds up feature 1, which
// shares its rows.
Layouts each_and_sum() {
  return Layouts({2}, {{0, Pooling::kEach, 0}, {0, Pooling::kSum, 0}},
                 {{0, 1, 1, 0, 0, 0}, {0, 0, 1, 0, 1, 0}, {1, 0, 2, 1, 0, 0}}, {2, 2});
}

void each_row_is_kept_and_has_its_own_gradient() {
  const Layouts layouts = each_and_sum();
  // Feature 0: {5, 6, 5}, {}, {7}; feature 1: {6}, {5}, {}.
  const Ids ids{5, 6, 5, 7, 6, 5}, splits{0, 3, 3, 4, 5, 6, 6};
  const Floats rows{1, 10, 2, 20, 3, 30};  // of 5, 6, 7
  const auto planned = layouts.plan(ids, splits, Bytes{0, 0}, Ids{0, 1}, 3);
  CHECK_EQUAL(layouts.parts(*planned, 0), 4u);
  CHECK_EQUAL(layouts.parts(*planned, 1), 3u);
  Floats kept(8), sums(6);
  layouts.gather(*planned, rows, std::vector<std::span<float>>{kept, sums});
  CHECK(kept == (Floats{10, 1, 20, 2, 10, 1, 30, 3}));
  CHECK(sums == (Floats{2, 20, 1, 10, 0, 0}));
  const Floats of_kept{1, 2, 3, 4, 5, 6, 7, 8}, of_sums{100, 200, 300, 400, 500, 600};
  Floats back(6);
  layouts.scatter(*planned, {}, std::vector<std::span<const float>>{of_kept, of_sums}, 2, back);
  CHECK(back == (Floats{2 * (2 + 6 + 300), 2 * (1 + 5 + 400), 2 * (4 + 100), 2 * (3 + 200), 16, 14}));
  const auto moves = layouts.moves(*planned, std::vector<int>{0});
  CHECK(moves.from == (Ids{1, 3, 1, 5}));
  CHECK(moves.to == (Ids{0, 2, 4, 6}));
  const Floats weights{1, 2, 3, 1, 1, 1};
  const auto weighted = layouts.plan(ids, splits, Bytes{0, 0}, Ids{0, 1}, 3, weights);
  layouts.gather(*weighted, rows, std::vector<std::span<float>>{kept, sums});
  CHECK(kept == (Floats{10, 1, 40, 4, 30, 3, 30, 3}));
  CHECK_THROWS(std::invalid_argument, "4 parts of 2 floats",
               layouts.gather(*planned, rows, std::vector<std::span<float>>{sums, sums}));
  CHECK_THROWS(std::invalid_argument, "no other feature",
               Layouts({1}, {{0, Pooling::kEach, 0}, {0, Pooling::kSum, 0}},
                       {{0, 0, 1, 0, 0, 0}, {1, 0, 1, 0, 1, 0}}, {2}));
}

void a_shared_cell_is_kept_once() {
  const Layouts layouts = each_and_sum();
  const auto shared = layouts.plan(Ids{5, 6, 5, 7}, Ids{0, 2, 3, 4}, Bytes{1, 0}, Ids{0, 1}, 2);
  CHECK_EQUAL(layouts.parts(*shared, 0), 2u);
  const Floats rows{1, 10, 2, 20, 3, 30};
  Floats kept(4), sums(4);
  layouts.gather(*shared, rows, std::vector<std::span<float>>{kept, sums});
  CHECK(kept == (Floats{10, 1, 20, 2}));
  Floats back(6);
  const Floats of_kept{1, 2, 3, 4}, of_sums{10, 20, 30, 40};
  layouts.scatter(*shared, {}, std::vector<std::span<const float>>{of_kept, of_sums}, 1, back);
  CHECK(back == (Floats{12, 21, 4, 3, 30, 40}));
  const auto absent = layouts.plan(Ids{5}, Ids{0, 1}, Bytes{0}, Ids{-1, 0}, 1);
  CHECK_EQUAL(layouts.parts(*absent, 0), 0u);
  CHECK_EQUAL(layouts.parts(*layouts.plan(Ids{5}, Ids{0, 1, 1}, Bytes{1, 1}, Ids{0, 1}, 0), 0), 0u);
}

void what_does_not_fit_is_refused() {
  const Layouts layouts = two_features();
  const auto planned = plan(layouts);
  const Layouts other({2}, {{0, Pooling::kSum, 0}}, {{0, 0, 2, 0, 0, 0, false}}, {2});
  Floats few(3), rows(8), two(4);
  using Outputs = std::vector<std::span<float>>;
  CHECK_THROWS(std::invalid_argument, "8 floats, got 3", layouts.gather(*planned, few, Outputs{two, two}));
  CHECK_THROWS(std::invalid_argument, "2 outputs, got 1", layouts.gather(*planned, rows, Outputs{two}));
  CHECK_THROWS(std::invalid_argument, "output 1", layouts.gather(*planned, rows, Outputs{two, few}));
  CHECK_THROWS(std::invalid_argument, "other layouts", other.gather(*planned, rows, Outputs{two}));
  CHECK_THROWS(std::invalid_argument, "one entry per cell",
               layouts.plan(Ids{1}, Ids{0, 1}, Bytes{0, 0}, Ids{0, 1}, 1));
  CHECK_THROWS(std::invalid_argument, "not fall",
               layouts.plan(Ids{1, 2}, Ids{0, 2, 1, 2, 2}, Bytes{0, 0}, Ids{0, 1}, 2));
  CHECK_THROWS(std::invalid_argument, "each once",
               layouts.plan(Ids{}, Ids{0, 0, 0}, Bytes{0, 0}, Ids{1, 1}, 1));
  CHECK_THROWS(std::invalid_argument, "one entry per feature",
               layouts.plan(Ids{}, Ids{0, 0, 0}, Bytes{0, 0}, Ids{0}, 1));
}

void layouts_that_reach_beyond_are_refused() {
  const std::vector<FeatureSpec> sum{{0, Pooling::kSum, 0}}, first{{0, Pooling::kFirstN, 3}};
  const auto make = [](std::vector<FeatureSpec> features, UseSpec use, std::int64_t floats) {
    Layouts({2}, std::move(features), {use}, {floats});
  };
  CHECK_THROWS(std::invalid_argument, "columns", make(sum, {0, 1, 2, 0, 0, 0, false}, 4));
  CHECK_THROWS(std::invalid_argument, "beyond", make(sum, {0, 0, 2, 0, 1, 0, false}, 2));
  CHECK_THROWS(std::invalid_argument, "beyond", make(first, {0, 0, 2, 0, 0, 2, false}, 5));
  CHECK_THROWS(std::invalid_argument, "added up", make(first, {0, 0, 2, 0, 0, 2, true}, 6));
  CHECK_THROWS(std::invalid_argument, "not there", make(sum, {1, 0, 2, 0, 0, 0, false}, 2));
  CHECK_THROWS(std::invalid_argument, "length", make({{0, Pooling::kSum, 3}}, {0, 0, 2, 0, 0, 0, false}, 2));
}

// Many features over shared tables, by every way to pool, on threads that share layouts.
void threads_give_the_same_bits() {
  std::mt19937_64 random(1);
  constexpr int kFeatures = 7;
  constexpr std::size_t kExamples = 500;
  const std::vector<int> dims{5, 16, 33};
  std::vector<FeatureSpec> features;
  std::vector<UseSpec> uses;
  std::vector<std::int64_t> floats;
  Ids ids, splits{0}, where;
  Bytes shared;
  for (int f = 0; f < kFeatures; ++f) {
    const auto pooling = static_cast<Pooling>(f % 5);
    features.push_back({f % 3, pooling, pooling == Pooling::kFirstN ? 2 : 0});
    uses.push_back({f, 1, 4, f, 0, 4, false});
    floats.push_back(pooling == Pooling::kFirstN ? 8 : 4);
    shared.push_back(f == 5);
    where.push_back(f);
    for (std::size_t cell = 0; cell < (f == 5 ? 1 : kExamples); ++cell) {
      for (std::uint64_t i = random() % 4; i > 0; --i)
        ids.push_back(static_cast<std::int64_t>(random() % 200));
      splits.push_back(static_cast<std::int64_t>(ids.size()));
    }
  }
  std::vector<std::vector<Floats>> results;
  for (const int threads : {1, 4}) {
    const Layouts layouts(dims, features, uses, floats, std::make_shared<Workers>(threads));
    const auto work = [&] {
      const auto batch = layouts.plan(ids, splits, shared, where, kExamples);
      std::mt19937 draw(2);
      Floats rows(batch->floats());
      for (float& value : rows) value = static_cast<float>(draw() % 7) - 3;
      std::vector<Floats> outputs;
      std::vector<std::span<float>> to;
      for (std::size_t o = 0; o < floats.size(); ++o)
        outputs.emplace_back(layouts.parts(*batch, o) * floats[o]);
      for (Floats& output : outputs) to.emplace_back(output);
      layouts.gather(*batch, rows, to);
      Floats out(batch->floats());
      layouts.scatter(*batch, rows, std::vector<std::span<const float>>(to.begin(), to.end()), 0.5f, out);
      outputs.push_back(std::move(out));
      return outputs;
    };
    std::vector<std::vector<Floats>> found(3);
    std::vector<std::thread> team;
    for (auto& one : found) team.emplace_back([&] { one = work(); });
    for (auto& thread : team) thread.join();
    results.insert(results.end(), found.begin(), found.end());
  }
  for (const auto& result : results) CHECK(result == results[0]);
}

// One table for all features: threads then share its ids. `widths` may have columns in common.
void check_sums_of_one_table(const std::vector<std::pair<int, int>>& columns, std::uint64_t range) {
  constexpr std::size_t kExamples = 7000;
  constexpr int kDim = 18;
  std::mt19937_64 random(3);
  std::vector<UseSpec> uses;
  std::int64_t floats = 0;
  for (int f = 0; f < 3; ++f)
    for (const auto& [start, width] : columns) {
      uses.push_back({f, start, width, 0, floats, 0, false});
      floats += width;
    }
  Ids ids, splits{0};
  for (int f = 0; f < 3; ++f)
    for (std::size_t cell = 0; cell < kExamples; ++cell) {
      for (std::uint64_t i = f < 2 ? 1 : random() % 3; i > 0; --i)
        ids.push_back(static_cast<std::int64_t>(random() % range));
      splits.push_back(static_cast<std::int64_t>(ids.size()));
    }
  Floats gradients(kExamples * floats);
  for (float& value : gradients) value = static_cast<float>(random() % 2001) * 0.01f - 10;

  // Gradient by gradient, as ids are met.
  std::map<std::int64_t, Floats> sums;
  for (int f = 0; f < 3; ++f)
    for (std::size_t cell = 0; cell < kExamples; ++cell)
      for (auto at = splits[f * kExamples + cell]; at < splits[f * kExamples + cell + 1]; ++at) {
        Floats& sum = sums.try_emplace(ids[at], kDim, 0.0f).first->second;
        for (const UseSpec& use : uses)
          for (int i = 0; i < use.width && use.feature == f; ++i)
            sum[use.start + i] += gradients[cell * floats + use.offset + i] * 0.7f;
      }
  for (const int threads : {1, 2, 7}) {
    const Layouts layouts({kDim}, std::vector<FeatureSpec>(3, {0, Pooling::kSum, 0}), uses, {floats},
                          std::make_shared<Workers>(threads));
    const auto batch = layouts.plan(ids, splits, Bytes{0, 0, 0}, Ids{0, 1, 2}, kExamples);
    Floats out(batch->floats(), 5.0f);
    layouts.scatter(*batch, {}, std::vector<std::span<const float>>{gradients}, 0.7f, out);
    bool same = batch->ids().size() == sums.size();
    for (std::size_t i = 0; i < batch->ids().size(); ++i)
      same &= std::equal(out.begin() + i * kDim, out.begin() + (i + 1) * kDim, sums[batch->ids()[i]].begin());
    CHECK(same);
  }
}

void gradients_are_summed_in_the_order_ids_are_met() {
  check_sums_of_one_table({{0, 1}, {1, 16}}, 1 << 20);    // hardly an id twice
  check_sums_of_one_table({{0, 1}, {1, 16}}, 300);        // most of them often
  check_sums_of_one_table({{2, 16}, {0, 8}, {5, 5}}, 9);  // stretches that have columns in common
}

// Outputs that read features in different orders: what is added up is added up in the order of its uses.
void uses_of_an_output_stay_in_order() {
  const std::vector<float> rows{1e8f, 1.0f, -1e8f};  // (1e8 + 1) - 1e8 is 0, (1e8 - 1e8) + 1 is 1
  const std::vector<FeatureSpec> features(3, {0, Pooling::kSum, 0});
  const Layouts layouts({1}, features,
                        {{0, 0, 1, 0, 0, 0, false},
                         {1, 0, 1, 0, 0, 0, true},
                         {2, 0, 1, 0, 0, 0, true},
                         {2, 0, 1, 1, 0, 0, false},
                         {0, 0, 1, 1, 0, 0, true},
                         {1, 0, 1, 1, 0, 0, true}},
                        {1, 1});
  const auto batch = layouts.plan(Ids{1, 2, 3}, Ids{0, 1, 2, 3}, Bytes{0, 0, 0}, Ids{0, 1, 2}, 1);
  Floats one(1), other(1);
  layouts.gather(*batch, rows, std::vector<std::span<float>>{one, other});
  CHECK_EQUAL(one[0], 0.0f);
  CHECK_EQUAL(other[0], 1.0f);
}

void fids_have_slot_and_signature() {
  CHECK_EQUAL(make_fid(2, 1, 100), 281474976710756);
  CHECK_EQUAL(make_fid(1, 1023, 1ULL << 54), static_cast<std::int64_t>(18428729675200069632ULL));
  CHECK_EQUAL(hash_float(0.0f), hash_float(-0.0f));
  const std::byte zeros[9] = {};
  CHECK(hash_bytes({zeros, 8}) != hash_bytes({zeros, 9}));
  CHECK(hash_bytes({}) != hash_bytes({zeros, 1}));
}

}  // namespace

int main() {
  return check::run({
      {"distinct ids are numbered as they come", distinct_ids_are_numbered_as_they_come},
      {"an id has the newest time of the examples that contain it",
       an_id_has_the_newest_time_of_the_examples_that_contain_it},
      {"ids in the order of a table are found as fast as others",
       ids_in_the_order_of_a_table_are_found_as_fast_as_others},
      {"outputs are gathered and gradients scattered", outputs_are_gathered_and_gradients_scattered},
      {"weights multiply rows and their gradients", weights_multiply_rows_and_their_gradients},
      {"each row is kept and has its own gradient", each_row_is_kept_and_has_its_own_gradient},
      {"a shared cell is kept once", a_shared_cell_is_kept_once},
      {"what does not fit is refused", what_does_not_fit_is_refused},
      {"layouts that reach beyond are refused", layouts_that_reach_beyond_are_refused},
      {"threads give the same bits", threads_give_the_same_bits},
      {"gradients are summed in the order ids are met", gradients_are_summed_in_the_order_ids_are_met},
      {"uses of an output stay in order", uses_of_an_output_stay_in_order},
      {"fids have slot and signature", fids_have_slot_and_signature},
  });
}
