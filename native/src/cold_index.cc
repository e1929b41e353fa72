#include "cold_index.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace monolith {
namespace {

constexpr std::size_t kLeastHomes = 8;
constexpr double kFreshLoad = 0.90;
constexpr double kEmptyLoad = 0.70;

// Partitions grow at different loads, so that memory grows smoothly. An entry then pushes about 100 others,
// which are next to each other.
double full_load(std::size_t partition) {
  return 0.935 + 0.03 * static_cast<double>(partition % 16) / 16;
}

std::size_t homes_for(std::size_t entries) {
  return static_cast<std::size_t>(static_cast<double>(entries) / kFreshLoad) + 1;
}

// What probing needs beyond the last home cell. Where it does not suffice, the partition grows.
std::size_t spare_for(std::size_t homes) {
  return 3 + std::min<std::size_t>(homes / 32, 125);
}

}  // namespace

std::size_t ColdIndex::expected_bytes(std::uint64_t entries) {
  constexpr auto partitions = std::size_t{1} << kPartitionBits;
  if (entries == 0) return sizeof(ColdIndex);
  const double load = std::sqrt(kFreshLoad * full_load(8));
  const double each = static_cast<double>(entries) / static_cast<double>(partitions) / load;
  const std::size_t homes = std::max(static_cast<std::size_t>(each), kLeastHomes);
  return partitions * ((homes + spare_for(homes)) * sizeof(std::uint64_t) + 2 * sizeof(void*)) +
         sizeof(ColdIndex);
}

// Puts an entry into its place; false if that would take the last cell.
bool ColdIndex::place(Partition& part, std::uint64_t entry) {
  auto& cells = part.cells;
  if (cells.empty() || cells[cells.size() - 2] != 0) return false;
  std::size_t at = part.home(entry >> kLocationBits);
  while (cells[at] != 0 && cells[at] < entry) ++at;
  for (std::uint64_t carried = entry; carried != 0; ++at) std::swap(carried, cells[at]);
  return true;
}

void ColdIndex::resize(Partition& part, std::size_t homes) {
  const std::vector<std::uint64_t> old = std::move(part.cells);
  for (homes = std::max(homes, kLeastHomes);; homes += homes / 32 + 1) {
    part.homes = static_cast<std::uint32_t>(homes);
    part.cells = std::vector<std::uint64_t>(homes + spare_for(homes));
    // In ascending order each goes behind the one before it.
    std::size_t next = 0;
    bool fits = true;
    for (const std::uint64_t entry : old) {
      if (entry == 0) continue;
      const std::size_t at = std::max(next, part.home(entry >> kLocationBits));
      if (at + 2 >= part.cells.size()) {
        fits = false;
        break;
      }
      part.cells[at] = entry;
      next = at + 1;
    }
    if (fits) break;
  }
  arrays_ += old.empty();
  cells_ += part.cells.size();
  cells_ -= old.size();
}

void ColdIndex::insert(std::uint64_t hash, std::uint64_t location) {
  const std::size_t number = partition_of(hash);
  Partition& part = parts_[number];
  const std::uint64_t entry = tag_of(hash) << kLocationBits | location;
  const std::size_t count = std::size_t{part.count} + 1;
  if (static_cast<double>(count) > full_load(number) * part.homes) resize(part, homes_for(count));
  while (!place(part, entry)) resize(part, std::size_t{part.homes} + part.homes / 32 + 1);
  ++part.count;
  ++size_;
}

bool ColdIndex::erase(std::uint64_t hash, std::uint64_t location) {
  const std::size_t number = partition_of(hash);
  Partition& part = parts_[number];
  if (part.cells.empty()) return false;
  auto& cells = part.cells;
  const std::uint64_t entry = tag_of(hash) << kLocationBits | location;
  std::size_t at = part.home(tag_of(hash));
  while (cells[at] != 0 && cells[at] < entry) ++at;
  if (cells[at] != entry) return false;
  for (; cells[at + 1] != 0 && part.home(cells[at + 1] >> kLocationBits) <= at; ++at)
    cells[at] = cells[at + 1];
  cells[at] = 0;
  --part.count;
  --size_;
  if (part.homes > 64 && part.count < kEmptyLoad * part.homes) resize(part, homes_for(part.count));
  return true;
}

bool ColdIndex::move(std::uint64_t hash, std::uint64_t from, std::uint64_t to) {
  Partition& part = parts_[partition_of(hash)];
  if (part.cells.empty()) return false;
  auto& cells = part.cells;
  const std::uint64_t tag = tag_of(hash) << kLocationBits;
  std::size_t at = part.home(tag_of(hash));
  while (cells[at] != 0 && cells[at] < (tag | from)) ++at;
  if (cells[at] != (tag | from)) return false;
  // In its cell, unless there are others with this tag.
  const bool first = at == 0 || cells[at - 1] < tag;
  const bool last = cells[at + 1] == 0 || cells[at + 1] > (tag | kLocationMask);
  if (first && last) {
    cells[at] = tag | to;
    return true;
  }
  erase(hash, from);
  insert(hash, to);
  return true;
}

void ColdIndex::clear() {
  for (Partition& part : parts_) part = {};
  size_ = cells_ = arrays_ = 0;
}

}  // namespace monolith
