#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "ranking.h"

namespace {

using namespace monolith;
using Floats = std::vector<float>;
using Ints = std::vector<std::int64_t>;
using Row = std::vector<double>;

bool close(double a, double b) {
  return std::abs(a - b) < 1e-12;
}

Row metrics(const Floats& scores, const Floats& relevance, const Ints& ks) {
  Row out(4 * ks.size() + 1);
  ranking_metrics(scores, relevance, Ints{0, static_cast<std::int64_t>(scores.size())}, ks, out);
  return out;
}

void what_is_wanted_counts_among_the_best_k() {
  // Ranks: 0.9 no, 0.8 yes, 0.7 no, 0.6 yes.
  const Row row = metrics({0.6f, 0.9f, 0.8f, 0.7f}, {1, 0, 1, 0}, {1, 2, 4});
  CHECK(close(row[0], 0.0) && close(row[1], 0.5) && close(row[2], 1.0));
  const double ideal = 1.0 + 1.0 / std::log2(3.0);
  CHECK(close(row[3], 0.0));
  CHECK(close(row[4], 1.0 / std::log2(3.0) / ideal));
  CHECK(close(row[5], (1.0 / std::log2(3.0) + 1.0 / std::log2(5.0)) / ideal));
  CHECK(close(row[6], 0.0) && close(row[7], 1.0) && close(row[8], 1.0));
  CHECK(close(row[9], 0.0) && close(row[10], 0.5) && close(row[11], 0.5));
  CHECK(close(row[12], 0.5));
}

void candidates_that_tie_are_worth_what_chance_is() {
  const Row row = metrics({1, 1, 1, 1}, {1, 0, 0, 0}, {1, 2});
  CHECK(close(row[0], 0.25) && close(row[1], 0.5));
  CHECK(close(row[2], 0.25) && close(row[3], (1.0 + 1.0 / std::log2(3.0)) / 4));
  CHECK(close(row[4], 0.25) && close(row[5], 0.5));
  CHECK(close(row[6], 0.25) && close(row[7], (1.0 + 1.0 / 2) / 4));
  CHECK(close(row[8], (1.0 + 1.0 / 2 + 1.0 / 3 + 1.0 / 4) / 4));
}

void a_k_beyond_the_candidates_means_all_of_them() {
  const Row row = metrics({1, 2}, {1, 0}, {100});
  CHECK(close(row[0], 1.0) && close(row[2], 1.0) && close(row[3], 0.5) && close(row[4], 0.5));
  CHECK(close(row[1], 1.0 / std::log2(3.0)));
}

void a_query_without_anything_wanted_has_nothing_to_say() {
  Row out(3 * 5);
  ranking_metrics(Floats{1, 2, 3}, Floats{0, 0, 1}, Ints{0, 2, 2, 3}, Ints{1}, out);
  CHECK(std::isnan(out[0]) && std::isnan(out[4]) && std::isnan(out[5]) && std::isnan(out[9]));
  CHECK(close(out[10], 1.0) && close(out[14], 1.0));
}

void infinite_scores_have_a_rank() {
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(close(metrics({-inf, inf, 0}, {0, 1, 0}, {1})[4], 1.0));
  CHECK(close(metrics({-inf, inf, 0}, {1, 0, 0}, {1})[4], 1.0 / 3));
}

void what_makes_no_sense_is_refused() {
  Row out(5);
  const float nan = std::nanf("");
  CHECK_THROWS(std::invalid_argument, "a score is NaN",
               ranking_metrics(Floats{nan}, Floats{1}, Ints{0, 1}, Ints{1}, out));
  CHECK_THROWS(std::invalid_argument, "relevance must be finite",
               ranking_metrics(Floats{1}, Floats{-1}, Ints{0, 1}, Ints{1}, out));
  CHECK_THROWS(std::invalid_argument, "splits must rise",
               ranking_metrics(Floats{1}, Floats{1}, Ints{0, 2}, Ints{1}, out));
  CHECK_THROWS(std::invalid_argument, "every k must be at least 1",
               ranking_metrics(Floats{1}, Floats{1}, Ints{0, 1}, Ints{0}, out));
  CHECK_THROWS(std::invalid_argument, "one relevance for each score",
               ranking_metrics(Floats{1}, Floats{}, Ints{0, 1}, Ints{1}, out));
  CHECK_THROWS(std::invalid_argument, "4 * ks + 1",
               ranking_metrics(Floats{1}, Floats{1}, Ints{0, 1}, Ints{1, 2}, out));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"what is wanted counts among the best k", what_is_wanted_counts_among_the_best_k},
      {"candidates that tie are worth what chance is", candidates_that_tie_are_worth_what_chance_is},
      {"a k beyond the candidates means all of them", a_k_beyond_the_candidates_means_all_of_them},
      {"a query without anything wanted has nothing to say",
       a_query_without_anything_wanted_has_nothing_to_say},
      {"infinite scores have a rank", infinite_scores_have_a_rank},
      {"what makes no sense is refused", what_makes_no_sense_is_refused},
  });
}
