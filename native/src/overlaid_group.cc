#include "overlaid_group.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "table_group.h"

namespace monolith {

OverlaidGroup::OverlaidGroup(std::vector<std::shared_ptr<const FrozenTable>> below,
                             std::vector<std::shared_ptr<const Table>> above,
                             std::shared_ptr<Workers> workers)
    : below_(below, std::move(workers)), above_(std::move(above)) {
  if (below.size() != above_.size()) throw std::invalid_argument("each table needs one below and one above");
  for (std::size_t i = 0; i < below.size(); ++i) {
    if (above_[i] == nullptr || static_cast<std::size_t>(above_[i]->dim()) != below[i]->dim())
      throw std::invalid_argument("table " + std::to_string(i) + " has rows of other widths below and above");
    dims_.push_back(static_cast<std::int64_t>(below[i]->dim()));
  }
}

void OverlaidGroup::lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
                           std::size_t num_batches, std::span<float> out) const {
  const FusedOffsets at = fused_offsets(dims_, sizes, num_batches, ids.size());
  if (out.size() != static_cast<std::size_t>(at.floats.back()))
    throw std::invalid_argument("out must hold dim floats per id: expected " +
                                std::to_string(at.floats.back()) + ", got " + std::to_string(out.size()));
  std::vector<std::uint8_t> found(ids.size());
  std::size_t hits = 0;
  for (std::size_t piece = 0; piece < sizes.size(); ++piece) {
    const auto first = static_cast<std::size_t>(at.ids[piece]),
               count = static_cast<std::size_t>(sizes[piece]);
    if (count == 0) continue;
    hits += above_[piece % above_.size()]->lookup(ids.subspan(first, count), out.data() + at.floats[piece],
                                                  found.data() + first);
  }
  if (hits == ids.size()) return;
  if (hits == 0) return below_.lookup(ids, sizes, num_batches, out);
  fill_in(ids, sizes, num_batches, found, ids.size() - hits, out);
}

// Reads what was not found above from below.
void OverlaidGroup::fill_in(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
                            std::size_t num_batches, const std::vector<std::uint8_t>& found,
                            std::size_t missing, std::span<float> out) const {
  std::vector<std::int64_t> left, left_sizes(sizes.size());
  left.reserve(missing);
  std::size_t floats = 0;
  for (std::size_t piece = 0, at = 0; piece < sizes.size(); ++piece) {
    const std::size_t before = left.size();
    for (const std::size_t end = at + static_cast<std::size_t>(sizes[piece]); at < end; ++at)
      if (!found[at]) left.push_back(ids[at]);
    left_sizes[piece] = static_cast<std::int64_t>(left.size() - before);
    floats += (left.size() - before) * static_cast<std::size_t>(dims_[piece % dims_.size()]);
  }
  const std::unique_ptr<float[]> rows(new float[floats]);
  below_.lookup(left, left_sizes, num_batches, {rows.get(), floats});
  const float* from = rows.get();
  float* to = out.data();
  for (std::size_t piece = 0, at = 0; piece < sizes.size(); ++piece) {
    const auto dim = static_cast<std::size_t>(dims_[piece % dims_.size()]);
    for (const std::size_t end = at + static_cast<std::size_t>(sizes[piece]); at < end; ++at, to += dim) {
      if (found[at]) continue;
      std::memcpy(to, from, dim * sizeof(float));
      from += dim;
    }
  }
}

}  // namespace monolith
