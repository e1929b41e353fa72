#include "ranking.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

namespace monolith {
namespace {

struct Candidate {
  float score;
  float gain;
};

// Candidates of equal score: those of ranks first to last - 1, from 0.
struct Tie {
  std::size_t first, last;
  std::size_t wanted;
  double gain;

  std::size_t size() const { return last - first; }
};

double discount(std::size_t rank) {
  return 1.0 / std::log2(static_cast<double>(rank) + 2.0);
}

// The chance that none of `wanted` among `size` is among the first `taken` of them, in any order.
double chance_of_none(std::size_t size, std::size_t wanted, std::size_t taken) {
  double chance = 1.0;
  for (std::size_t drawn = 0; drawn < taken; ++drawn) {
    if (drawn + wanted >= size) return 0.0;
    chance *= static_cast<double>(size - wanted - drawn) / static_cast<double>(size - drawn);
  }
  return chance;
}

// The mean of 1 / rank of the first that is wanted, where a rank behind k counts as 0.
double reciprocal_rank(const Tie& tie, std::size_t k) {
  double sum = 0.0, chance = 1.0;  // that none came before
  for (std::size_t before = 0; before + tie.wanted <= tie.size() && tie.first + before < k; ++before) {
    const double left = static_cast<double>(tie.size() - before);
    const double now = static_cast<double>(tie.wanted) / left;
    sum += chance * now / static_cast<double>(tie.first + before + 1);
    chance *= 1.0 - now;
  }
  return sum;
}

class Query {
 public:
  Query(std::span<const float> scores, std::span<const float> relevance, std::size_t most)
      : scores_(scores), relevance_(relevance), most_(std::min(most, scores.size())) {
    for (const float gain : relevance) wanted_ += gain > 0;
  }

  bool has_wanted() const { return wanted_ > 0; }

  // Puts the best `most` in order, with all that tie with the last of them.
  void rank() {
    best_.clear();
    for (std::size_t i = 0; i < scores_.size(); ++i) best_.push_back({scores_[i], relevance_[i]});
    const auto higher = [](const Candidate& a, const Candidate& b) { return a.score > b.score; };
    auto end = best_.begin() + static_cast<std::ptrdiff_t>(most_);
    if (end != best_.end()) {
      std::nth_element(best_.begin(), end - 1, best_.end(), higher);
      const float least = (end - 1)->score;
      end = std::partition(end, best_.end(), [least](const Candidate& one) { return one.score == least; });
    }
    std::sort(best_.begin(), end, higher);
    ties_.clear();
    for (auto at = best_.begin(); at != end;) {
      const auto first = at;
      Tie tie{static_cast<std::size_t>(first - best_.begin()), 0, 0, 0.0};
      for (; at != end && at->score == first->score; ++at) {
        tie.wanted += at->gain > 0;
        tie.gain += at->gain;
      }
      tie.last = static_cast<std::size_t>(at - best_.begin());
      ties_.push_back(tie);
    }
    ideal_.assign(relevance_.begin(), relevance_.end());
    std::partial_sort(ideal_.begin(), ideal_.begin() + static_cast<std::ptrdiff_t>(most_), ideal_.end(),
                      std::greater<>());
  }

  void at(std::size_t k, double& recall, double& ndcg, double& hit) const {
    double found = 0.0, gain = 0.0, ideal = 0.0, none = 1.0;
    for (const Tie& tie : ties_) {
      if (tie.first >= k) break;
      const std::size_t taken = std::min(k, tie.last) - tie.first;
      const double size = static_cast<double>(tie.size());
      found += static_cast<double>(tie.wanted) * static_cast<double>(taken) / size;
      none *= chance_of_none(tie.size(), tie.wanted, taken);
      double discounts = 0.0;
      for (std::size_t rank = tie.first; rank < tie.first + taken; ++rank) discounts += discount(rank);
      gain += tie.gain / size * discounts;
    }
    for (std::size_t rank = 0; rank < std::min(k, most_); ++rank) ideal += ideal_[rank] * discount(rank);
    recall = found / static_cast<double>(wanted_);
    ndcg = gain / ideal;
    hit = 1.0 - none;
  }

  // The candidates that tie with the best of those that are wanted.
  Tie first_wanted() const {
    float best = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < scores_.size(); ++i)
      if (relevance_[i] > 0) best = std::max(best, scores_[i]);
    Tie tie{0, 0, 0, 0.0};
    std::size_t same = 0;
    for (std::size_t i = 0; i < scores_.size(); ++i) {
      tie.first += scores_[i] > best;
      same += scores_[i] == best;
      tie.wanted += scores_[i] == best && relevance_[i] > 0;
    }
    tie.last = tie.first + same;
    return tie;
  }

 private:
  std::span<const float> scores_;
  std::span<const float> relevance_;
  std::size_t most_;
  std::size_t wanted_ = 0;
  std::vector<Candidate> best_;
  std::vector<Tie> ties_;
  std::vector<float> ideal_;
};

void check(std::span<const float> scores, std::span<const float> relevance,
           std::span<const std::int64_t> splits, std::span<const std::int64_t> ks, std::span<double> out) {
  if (scores.size() != relevance.size())
    throw std::invalid_argument("ranking: there must be one relevance for each score");
  if (splits.empty() || splits.front() != 0 || splits.back() != static_cast<std::int64_t>(scores.size()) ||
      !std::is_sorted(splits.begin(), splits.end()))
    throw std::invalid_argument("ranking: splits must rise from 0 to the number of scores");
  if (std::any_of(ks.begin(), ks.end(), [](std::int64_t k) { return k < 1; }))
    throw std::invalid_argument("ranking: every k must be at least 1");
  if (out.size() != (splits.size() - 1) * (4 * ks.size() + 1))
    throw std::invalid_argument("ranking: `out` must have 4 * ks + 1 numbers for each query");
  if (std::any_of(scores.begin(), scores.end(), [](float score) { return std::isnan(score); }))
    throw std::invalid_argument("ranking: a score is NaN, which has no rank");
  if (!std::all_of(relevance.begin(), relevance.end(),
                   [](float gain) { return std::isfinite(gain) && gain >= 0; }))
    throw std::invalid_argument("ranking: relevance must be finite and not below 0");
}

}  // namespace

void ranking_metrics(std::span<const float> scores, std::span<const float> relevance,
                     std::span<const std::int64_t> splits, std::span<const std::int64_t> ks,
                     std::span<double> out) {
  check(scores, relevance, splits, ks, out);
  const std::size_t many = ks.size(), width = 4 * many + 1;
  const std::size_t most = ks.empty() ? 0 : static_cast<std::size_t>(*std::max_element(ks.begin(), ks.end()));
  for (std::size_t query = 0; query + 1 < splits.size(); ++query) {
    const auto first = static_cast<std::size_t>(splits[query]);
    const std::size_t size = static_cast<std::size_t>(splits[query + 1]) - first;
    const auto row = out.subspan(query * width, width);
    Query one(scores.subspan(first, size), relevance.subspan(first, size), most);
    if (!one.has_wanted()) {
      std::fill(row.begin(), row.end(), std::numeric_limits<double>::quiet_NaN());
      continue;
    }
    if (many) one.rank();
    const Tie first_wanted = one.first_wanted();
    for (std::size_t i = 0; i < many; ++i) {
      const auto k = static_cast<std::size_t>(ks[i]);
      one.at(k, row[i], row[many + i], row[2 * many + i]);
      row[3 * many + i] = reciprocal_rank(first_wanted, k);
    }
    row[4 * many] = reciprocal_rank(first_wanted, size);
  }
}

}  // namespace monolith
