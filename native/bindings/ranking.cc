// Python face of monolith::ranking_metrics: releases the GIL, adds no behaviour.
#include "ranking.h"

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Out = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void metrics(const Column<float>& scores, const Column<float>& relevance, const Column<std::int64_t>& splits,
             const Column<std::int64_t>& ks, const Out& out) {
  GilReleased unlocked;
  ranking_metrics(as_span(scores), as_span(relevance), as_span(splits), as_span(ks), as_span(out));
}

}  // namespace

void bind_ranking(nb::module_& m) {
  m.def("ranking_metrics", &metrics, "scores"_a.noconvert(), "relevance"_a.noconvert(),
        "splits"_a.noconvert(), "ks"_a.noconvert(), "out"_a.noconvert(),
        "Write recall, NDCG, hit rate and reciprocal rank at each k, and the reciprocal rank among all, of "
        "each "
        "query to a row of `out`.");
}

}  // namespace monolith
