// Ranking metrics: how high a model ranks the wanted items among the candidates of each query.
//
// Candidates of equal score have no order, so a metric is the mean over all orders of them, in closed form: a
// model that scores everything alike is worth what chance is, however the candidates lie in memory. Of each
// query only the best k candidates are put in order; all others are merely counted.
#pragma once

#include <cstdint>
#include <span>

namespace monolith {

// Writes metrics of each query to a row of `out`: recall, NDCG, hit rate and reciprocal rank at each k, then
// the reciprocal rank among all, which is 4 * ks + 1 numbers. At k, a reciprocal rank is 0 if no wanted item
// is among the best k. A query without a candidate that is wanted has nothing to say: NaN.
//
//   scores, relevance: of all candidates, query after query; relevance is 0 for what is not wanted and the
//     gain of what is.
//   splits: where each query begins, and the end of the last.
//   ks: at least 1 each; a k beyond the candidates means all of them.
//
// Throws std::invalid_argument where sizes do not fit, a score is NaN, or a relevance is not finite or below
// 0.
void ranking_metrics(std::span<const float> scores, std::span<const float> relevance,
                     std::span<const std::int64_t> splits, std::span<const std::int64_t> ks,
                     std::span<double> out);

}  // namespace monolith
