// RecentRows: rows that were read from files lately, for the write that follows the lookup.
//
//   read 7, 8, 9        ring: 7 8 9 . . .
//   write of 7, 8, 9    found here, and not read again
//   ...                 the oldest gives way to the newest, whether it was found or not
//
// So what a batch read is there until the ring has gone round: its memory follows the batches, in pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "hash.h"

namespace monolith {

// Not thread-safe: its owner has a lock.
class RecentRows {
 public:
  explicit RecentRows(std::size_t record_bytes) : record_bytes_(record_bytes) {}

  std::size_t bytes() const {
    return pieces_.size() * kPiece * (record_bytes_ + sizeof(std::uint64_t)) + places_.size() * sizeof(Place);
  }
  // What a row takes, with its share of the places.
  std::size_t row_cost() const { return record_bytes_ + sizeof(std::uint64_t) + 2 * sizeof(Place); }

  // Room for so many rows, rounded up. Those that find none are dropped.
  void resize(std::size_t rows) {
    const std::size_t pieces = (rows + kPiece - 1) / kPiece;
    if (pieces == pieces_.size()) return;
    while (pieces_.size() < pieces) {
      pieces_.emplace_back();
      pieces_.back().keys.reset(new std::uint64_t[kPiece]());
      pieces_.back().records.reset(new std::byte[kPiece * record_bytes_]);
    }
    pieces_.resize(pieces);
    if (next_ >= pieces * kPiece) next_ = 0;
    places_ = std::vector<Place>(pieces * kPiece * 3 / 2 + 1);
    for (Place at = 0; at < pieces * kPiece; ++at)
      if (key(at) != 0) place(at);
  }

  // The record that was put under a key; null if there is none. A key is not 0.
  const std::byte* find(std::uint64_t wanted) const {
    if (places_.empty()) return nullptr;
    for (std::size_t i = home(wanted); places_[i] != 0; i = i + 1 < places_.size() ? i + 1 : 0)
      if (key(places_[i] - 1) == wanted) return record(places_[i] - 1);
    return nullptr;
  }

  void put(std::uint64_t wanted, const std::byte* bytes) {
    if (places_.empty() || find(wanted) != nullptr) return;
    const Place at = next_;
    next_ = next_ + 1u < pieces_.size() * kPiece ? next_ + 1 : 0;
    if (key(at) != 0) forget(at);
    key(at) = wanted;
    std::memcpy(record(at), bytes, record_bytes_);
    place(at);
  }

 private:
  using Place = std::uint32_t;  // of a row in the ring; in places_ plus 1, 0 is free
  static constexpr std::size_t kPiece = 256;
  struct Piece {
    std::unique_ptr<std::uint64_t[]> keys;
    std::unique_ptr<std::byte[]> records;
  };

  std::uint64_t& key(Place at) { return pieces_[at / kPiece].keys[at % kPiece]; }
  const std::uint64_t& key(Place at) const { return pieces_[at / kPiece].keys[at % kPiece]; }
  std::byte* record(Place at) const {
    return pieces_[at / kPiece].records.get() + at % kPiece * record_bytes_;
  }
  std::size_t home(std::uint64_t wanted) const {
    return (mix(static_cast<std::int64_t>(wanted)) >> 32) * places_.size() >> 32;
  }
  void place(Place at) {
    std::size_t i = home(key(at));
    while (places_[i] != 0) i = i + 1 < places_.size() ? i + 1 : 0;
    places_[i] = at + 1;
  }
  // Frees a place, and moves those behind it up, so that each is found from its home.
  void forget(Place at) {
    const std::size_t size = places_.size();
    std::size_t hole = home(key(at));
    while (places_[hole] != at + 1) hole = hole + 1 < size ? hole + 1 : 0;
    for (std::size_t i = hole;;) {
      i = i + 1 < size ? i + 1 : 0;
      if (places_[i] == 0) break;
      const std::size_t from = home(key(places_[i] - 1));
      if ((i + size - from) % size < (i + size - hole) % size) continue;  // its home lies behind the hole
      places_[hole] = places_[i];
      hole = i;
    }
    places_[hole] = 0;
    key(at) = 0;
  }

  const std::size_t record_bytes_;
  std::vector<Piece> pieces_;
  std::vector<Place> places_;  // by hash of the key: linear probing
  Place next_ = 0;
};

}  // namespace monolith
