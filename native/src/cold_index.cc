#include "cold_index.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace monolith {
namespace {

constexpr std::size_t kLeastHomes = 16;
constexpr std::size_t kMostSpare = 512;  // cells beyond the home cells
constexpr double kFreshLoad = 0.78;

// Partitions grow at different loads, so that memory grows smoothly.
double full_load(std::size_t partition) {
  return 0.84 + 0.06 * static_cast<double>(partition % 16) / 16;
}

std::size_t cells_for(std::size_t homes) {
  return homes + std::min(homes, kMostSpare) + 1;
}

}  // namespace

std::size_t ColdIndex::expected_bytes(std::uint64_t entries) {
  constexpr auto partitions = std::size_t{1} << kPartitionBits;
  const double load = std::sqrt(kFreshLoad * full_load(8));
  const double homes = static_cast<double>(entries) / static_cast<double>(partitions) / load;
  const std::size_t cells =
      entries == 0 ? 0 : cells_for(std::max(static_cast<std::size_t>(homes), kLeastHomes));
  return partitions * cells * sizeof(std::uint64_t) + sizeof(ColdIndex);
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
  for (homes = std::max(homes, kLeastHomes);; homes += homes / 4) {
    part.homes = homes;
    part.cells.assign(cells_for(homes), 0);
    part.cells.shrink_to_fit();
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
  cells_ += part.cells.size();
  cells_ -= old.size();
}

void ColdIndex::insert(std::uint64_t hash, std::uint64_t location) {
  const std::size_t number = partition_of(hash);
  Partition& part = parts_[number];
  const std::uint64_t entry = tag_of(hash) << kLocationBits | location;
  const auto grown = [&] {
    return static_cast<std::size_t>(static_cast<double>(part.count + 1) / kFreshLoad) + 1;
  };
  if (static_cast<double>(part.count + 1) > full_load(number) * static_cast<double>(part.homes))
    resize(part, grown());
  while (!place(part, entry)) resize(part, std::max(grown(), part.homes + part.homes / 4 + 1));
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
  if (part.homes > 64 && part.count < part.homes / 3)
    resize(part, static_cast<std::size_t>(static_cast<double>(part.count) / kFreshLoad) + 1);
  return true;
}

void ColdIndex::clear() {
  for (Partition& part : parts_) part = {};
  size_ = cells_ = 0;
}

}  // namespace monolith
