// For subscribers of a table: which ids changed, and digests of its rows.
#include <algorithm>
#include <stdexcept>

#include "digest.h"
#include "table_body.h"

namespace monolith {

void Table::touch(std::shared_ptr<TouchedKeySet> set) {
  const PausedWriters paused(*this);
  touched_.push_back(std::move(set));
}

void Table::untouch(const TouchedKeySet& set) {
  const PausedWriters paused(*this);
  std::erase_if(touched_, [&](const auto& one) { return one.get() == &set; });
}

void Table::tell_touched(std::span<const std::int64_t> ids) {
  if (ids.empty()) return;
  for (const auto& set : touched_) set->insert(ids);
}

// Called while writers are paused: all ids of the body are about to lose their rows. A set with a smaller
// capacity only counts them as lost: inserting them would empty it again and again.
void Table::touch_all(const Body& body) {
  if (touched_.empty()) return;
  std::size_t rows = 0;
  for (const auto& part : body.partitions) rows += part->rows;
  if (rows == 0) return;
  std::vector<std::int64_t> ids;
  for (const auto& set : touched_) {
    if (rows > set->capacity()) {
      set->lose(rows);
      continue;
    }
    if (ids.empty()) {
      ids.reserve(rows);
      for (const auto& part : body.partitions) {
        const Index index = part->index.load(std::memory_order_relaxed);
        for (std::size_t i = 0; i < index.size(); ++i)
          if (index.slots()[i].row != 0) ids.push_back(unmix(index.slots()[i].hash));
      }
    }
    set->insert(ids);
  }
}

// In no order. A partition is locked while its index is looked through, not longer.
std::vector<std::int64_t> Table::ids_between(std::uint64_t first, std::uint64_t last) const {
  std::vector<std::int64_t> ids;
  const Epochs::Visit visit(epochs_);
  const Body& body = *body_.load();
  for (std::uint64_t cursor = first;;) {
    Partition& part = *body.route(cursor);
    std::lock_guard lock(part.mutex);
    if (!part.owns(cursor)) continue;
    const Index index = part.index.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < index.size(); ++i) {
      const Slot& slot = index.slots()[i];
      if (slot.row != 0 && slot.hash >= cursor && slot.hash <= last) ids.push_back(unmix(slot.hash));
    }
    const std::uint64_t part_last = part.last;
    if (part_last >= last) return ids;
    cursor = part_last + 1;
  }
}

void Table::digests(std::span<const std::int64_t> buckets, std::uint64_t number, std::uint64_t total,
                    std::uint64_t* sums) const {
  constexpr std::size_t kAtOnce = 4096;
  constexpr std::uint64_t kWidth = std::uint64_t{1} << (64 - kBucketBits);
  if (number >= total) throw std::invalid_argument("digests: a share is a number and a larger total");
  for (std::size_t i = 0; i < buckets.size(); ++i)
    if (buckets[i] < 0 || buckets[i] >= 1 << kBucketBits || (i > 0 && buckets[i] <= buckets[i - 1]))
      throw std::invalid_argument("digests: buckets must be ascending, from 0 to 4095");
  std::fill_n(sums, buckets.size(), 0);
  const auto dim = static_cast<std::size_t>(entry_.dim());
  std::vector<float> values;
  std::vector<std::uint8_t> found;
  for (std::size_t begin = 0, end; begin < buckets.size(); begin = end) {
    end = begin + 1;  // buckets that follow each other are met together
    while (end < buckets.size() && buckets[end] == buckets[end - 1] + 1) ++end;
    std::vector<std::int64_t> ids =
        ids_between(static_cast<std::uint64_t>(buckets[begin]) * kWidth,
                    static_cast<std::uint64_t>(buckets[end - 1]) * kWidth + (kWidth - 1));
    std::erase_if(ids, [&](std::int64_t id) { return static_cast<std::uint64_t>(id) % total != number; });
    for (std::size_t at = 0; at < ids.size(); at += kAtOnce) {
      const std::span some = std::span(ids).subspan(at, std::min(kAtOnce, ids.size() - at));
      values.resize(some.size() * dim);
      found.resize(some.size());
      lookup_rows(some, found.data(), nullptr, values.data(), nullptr);
      for (std::size_t i = 0; i < some.size(); ++i)
        if (found[i]) {
          const std::size_t place =
              begin + bucket_of(mix(some[i])) - static_cast<std::uint64_t>(buckets[begin]);
          sums[place] += row_digest(some[i], {values.data() + i * dim, dim});
        }
    }
  }
}

}  // namespace monolith
