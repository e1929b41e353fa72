// Python face of the admission filters: checks shapes, releases the GIL, adds no behaviour.
#include "admission.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <map>
#include <optional>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "probabilistic_filter.h"
#include "sliding_filter.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

using Ids = Column<std::int64_t>;
using Counts = Column<std::uint32_t>;
using Thresholds = std::map<std::uint32_t, std::uint32_t>;
using Unlocked = nb::call_guard<GilReleased>;

template <class Filter>
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> refuse(Filter& filter, const Ids& ids,
                                                         const std::optional<Counts>& counts) {
  if (counts && counts->size() != ids.size())
    throw nb::value_error("refuse: `ids` and `counts` must be of one length");
  std::vector<std::uint8_t> mask(ids.size());
  {
    GilReleased unlocked;
    filter.refuse(as_span(ids), counts ? as_span(*counts) : std::span<const std::uint32_t>(), mask);
  }
  return owned(std::move(mask));
}

nb::ndarray<nb::numpy, std::uint16_t, nb::ndim<1>> read_cells(const SlidingFilter& filter, std::size_t split,
                                                              std::size_t offset,
                                                              std::optional<std::size_t> count) {
  if (offset > filter.cells_per_split())
    throw nb::value_error("read_cells: `offset` is past the end of the split");
  std::vector<SlidingFilter::Cell> cells;
  {
    GilReleased unlocked;
    cells.resize(std::min(count.value_or(filter.cells_per_split()), filter.cells_per_split() - offset));
    filter.read_cells(split, offset, cells);
  }
  return owned(std::move(cells));
}

void write_cells(SlidingFilter& filter, std::size_t split, std::size_t offset,
                 const Column<std::uint16_t>& cells) {
  GilReleased unlocked;
  filter.write_cells(split, offset, as_span(cells));
}

constexpr const char* kRefuse =
    "Record `counts` sightings of each id (None is one each), in order; a uint8 mask, 1 where the id must "
    "wait.";

}  // namespace

void bind_admission(nb::module_& m) {
  nb::class_<Admission>(m, "Admission", "Says which unseen ids earn a row. Thread-safe.")
      .def("refuses", &Admission::refuses, "id"_a, "count"_a = 1, Unlocked(),
           "Record `count` sightings of an id; true when it must wait.");

  nb::class_<SlidingFilterMeta>(m, "SlidingFilterMeta", "What a checkpoint says of a sliding filter.")
      .def(
          "__init__",
          [](SlidingFilterMeta* self, std::uint32_t split_num, std::uint32_t max_forward_step,
             std::uint32_t max_backward_step, std::uint32_t max_step, std::uint32_t head,
             std::uint32_t head_increment, std::uint64_t failure_count) {
            new (self) SlidingFilterMeta{split_num, max_forward_step, max_backward_step, max_step,
                                         head,      head_increment,   failure_count};
          },
          nb::kw_only(), "split_num"_a, "max_forward_step"_a, "max_backward_step"_a, "max_step"_a, "head"_a,
          "head_increment"_a, "failure_count"_a)
      .def_ro("split_num", &SlidingFilterMeta::split_num)
      .def_ro("max_forward_step", &SlidingFilterMeta::max_forward_step)
      .def_ro("max_backward_step", &SlidingFilterMeta::max_backward_step)
      .def_ro("max_step", &SlidingFilterMeta::max_step)
      .def_ro("head", &SlidingFilterMeta::head)
      .def_ro("head_increment", &SlidingFilterMeta::head_increment)
      .def_ro("failure_count", &SlidingFilterMeta::failure_count);

  nb::class_<FilterSplitMeta>(m, "FilterSplitMeta",
                              "What a checkpoint says of one split of a sliding filter.")
      .def(
          "__init__",
          [](FilterSplitMeta* self, std::uint64_t failure_count, std::uint64_t total_size,
             std::uint64_t num_elements, double fill_rate) {
            new (self) FilterSplitMeta{failure_count, total_size, num_elements, fill_rate};
          },
          nb::kw_only(), "failure_count"_a, "total_size"_a, "num_elements"_a, "fill_rate"_a)
      .def_ro("failure_count", &FilterSplitMeta::failure_count)
      .def_ro("total_size", &FilterSplitMeta::total_size)
      .def_ro("num_elements", &FilterSplitMeta::num_elements)
      .def_ro("fill_rate", &FilterSplitMeta::fill_rate);

  nb::class_<SlidingFilter, Admission>(
      m, "SlidingFilter", "Admits an id after enough sightings; old sightings fade. Thread-safe.")
      .def(
          "__init__",
          [](SlidingFilter* self, std::size_t capacity, std::size_t split_num,
             std::uint32_t default_threshold, const Thresholds& thresholds) {
            new (self) SlidingFilter(capacity, split_num, SlotThresholds(default_threshold, thresholds));
          },
          "capacity"_a = SlidingFilter::kDefaultCapacity, "split_num"_a = SlidingFilter::kDefaultSplits,
          nb::kw_only(), "default_threshold"_a = 0, "thresholds"_a = Thresholds{},
          "`thresholds` maps a slot to its threshold; thresholds are 1 to 15, 0 asks nothing.")
      .def("refuse", &refuse<SlidingFilter>, "ids"_a.noconvert(), "counts"_a.noconvert().none() = nb::none(),
           kRefuse)
      .def("add", nb::overload_cast<std::int64_t, std::uint32_t>(&SlidingFilter::add), "id"_a, "count"_a = 1,
           Unlocked(), "Record sightings; the count before them, 15 when there is no cell for the id.")
      .def("get", &SlidingFilter::get, "id"_a, Unlocked(), "What `add` would answer, nothing recorded.")
      .def("should_be_filtered", &SlidingFilter::should_be_filtered, "id"_a, "count"_a, "threshold"_a,
           Unlocked(), "As `refuses`, with a threshold of one's own.")
      .def("__len__", &SlidingFilter::size, "Cells in use.")
      .def_prop_ro("failures", &SlidingFilter::failures, "Sightings that found no cell.")
      .def_prop_ro("split_num", &SlidingFilter::splits, "Splits, and so files of a checkpoint.")
      .def_prop_ro("cells_per_split", &SlidingFilter::cells_per_split)
      .def_prop_ro("capacity_per_split", &SlidingFilter::capacity_per_split)
      .def("meta", &SlidingFilter::meta, Unlocked())
      .def("split_meta", &SlidingFilter::split_meta, "split"_a, Unlocked())
      .def("read_cells", &read_cells, "split"_a, "offset"_a = 0, "count"_a.none() = nb::none(),
           "A copy of up to `count` cells (None is the rest) as uint16. Hold sightings back between calls to "
           "save one "
           "moment.")
      .def(
          "copy", [](const SlidingFilter& filter) { return std::shared_ptr(filter.copy()); }, Unlocked(),
          "The filter at this moment, as another one.")
      .def("restore", &SlidingFilter::restore, "meta"_a, Unlocked(),
           "Empty every split and take over the head; `restore_split` and `write_cells` follow.")
      .def("restore_split", &SlidingFilter::restore_split, "split"_a, "meta"_a, Unlocked(),
           "Check that a saved split fits, and take over its failure count; elements are counted from the "
           "cells.")
      .def("write_cells", &write_cells, "split"_a, "offset"_a, "cells"_a.noconvert());

  nb::class_<ProbabilisticFilter, Admission>(m, "ProbabilisticFilter", "Admits an id by chance. Thread-safe.")
      .def(
          "__init__",
          [](ProbabilisticFilter* self, bool equal_probability, std::uint32_t default_threshold,
             const Thresholds& thresholds, std::uint64_t seed) {
            new (self)
                ProbabilisticFilter(equal_probability, SlotThresholds(default_threshold, thresholds), seed);
          },
          nb::kw_only(), "equal_probability"_a, "default_threshold"_a = 0, "thresholds"_a = Thresholds{},
          "seed"_a)
      .def("refuse", &refuse<ProbabilisticFilter>, "ids"_a.noconvert(),
           "counts"_a.noconvert().none() = nb::none(), kRefuse)
      .def_prop_rw("draws", &ProbabilisticFilter::draws, &ProbabilisticFilter::set_draws,
                   "How often it has drawn, which is all there is to save.")
      .def_static("admission_rate", &ProbabilisticFilter::admission_rate, "equal_probability"_a, "count"_a,
                  "threshold"_a, "The probability that `count` sightings admit an id.");
}

}  // namespace monolith
