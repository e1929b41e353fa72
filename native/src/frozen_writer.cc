#include "frozen_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "checksum.h"
#include "frozen_coding.h"

namespace monolith {
namespace {

constexpr double kLoad = 0.7;  // of the index: a fuller index makes more ids overflow to the next bucket
constexpr std::size_t kAhead = 16;

template <class T>
std::span<const std::byte> bytes_of(const T& one) {
  return std::as_bytes(std::span(&one, 1));
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& all) {
  return std::as_bytes(std::span(all));
}

const std::vector<FrozenSegment>& checked(const std::vector<FrozenSegment>& segments) {
  if (segments.empty() || segments.size() > kFrozenMaxSegments)
    throw std::invalid_argument("a frozen table has 1 to " + std::to_string(kFrozenMaxSegments) +
                                " segments, got " + std::to_string(segments.size()));
  std::size_t dim = 0;
  for (const FrozenSegment& segment : segments) {
    if (segment.dim < 1) throw std::invalid_argument("a segment needs a dim of at least 1, got 0");
    dim += segment.dim;
  }
  if (dim > kFrozenMaxDim)
    throw std::invalid_argument("a row has at most " + std::to_string(kFrozenMaxDim) + " floats, got " +
                                std::to_string(dim));
  return segments;
}

}  // namespace

FrozenWriter::FrozenWriter(std::vector<FrozenSegment> segments, std::string name, std::uint64_t max_rows)
    : segments_(checked(segments)),
      name_(std::move(name)),
      max_rows_(max_rows),
      row_bytes_(frozen_row_bytes(segments_)) {
  for (const FrozenSegment& segment : segments_) dim_ += segment.dim;
  if (name_.size() > kFrozenMaxName)
    throw std::invalid_argument("a name has at most " + std::to_string(kFrozenMaxName) + " bytes");
  if (max_rows > kFrozenMaxRows)
    throw std::invalid_argument("a frozen table has at most " + std::to_string(kFrozenMaxRows) +
                                " rows, got " + std::to_string(max_rows) + "; spread them over shards");
}

// The whole file has one CRC, and every MiB of what is `checked` its own.
void FrozenWriter::append(std::span<const std::byte> bytes, bool checked) {
  crc_ = crc32c(bytes, crc_);
  while (!bytes.empty()) {
    const std::size_t room = kFrozenChecked - bytes_ % kFrozenChecked;
    const auto piece = bytes.first(std::min(room, bytes.size()));
    if (checked) {
      if (bytes_ % kFrozenChecked == 0) checksums_.push_back(0);
      checksums_.back() = crc32c(piece, checksums_.back());
    }
    bytes_ += piece.size();
    bytes = bytes.subspan(piece.size());
  }
}

FrozenHead FrozenWriter::begin() {
  const FrozenHead head;
  append(bytes_of(head), true);
  return head;
}

void FrozenWriter::note_error(float given, float decoded) {
  const double error = std::abs(static_cast<double>(decoded) - static_cast<double>(given));
  largest_error_ = std::max(largest_error_, error);
  error_sum_ += error;
}

void FrozenWriter::encode(std::int64_t id, const float* values, std::byte* row) {
  for (std::size_t i = 0; i < dim_; ++i)
    if (!std::isfinite(values[i]))
      throw std::invalid_argument("value " + std::to_string(i) + " of the row of id " + std::to_string(id) +
                                  " is " + std::to_string(values[i]) +
                                  ", which would spoil every answer it is part of");
  frozen_encode(segments_, values, row, row_bytes_,
                [this](float given, float decoded) { note_error(given, decoded); });
}

void FrozenWriter::add(std::span<const std::int64_t> ids, std::span<const float> values,
                       std::span<std::byte> out) {
  if (values.size() != ids.size() * dim_ || out.size() != ids.size() * row_bytes_)
    throw std::invalid_argument("there must be dim values and row_bytes bytes for each id");
  if (ids.size() > max_rows_ - ids_.size())
    throw std::invalid_argument("more rows came than the " + std::to_string(max_rows_) +
                                " that were announced");
  for (std::size_t i = 0; i < ids.size(); ++i)
    encode(ids[i], values.data() + i * dim_, out.data() + i * row_bytes_);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  append(out, true);
}

// Puts every id into its bucket; returns how many buckets one has to look into at most.
std::uint32_t FrozenWriter::place_ids(std::span<FrozenBucket> buckets) const {
  std::uint64_t longest = 1;
  for (std::size_t row = 0; row < ids_.size(); ++row) {
    if (row + kAhead < ids_.size())
      __builtin_prefetch(&buckets[frozen_home(ids_[row + kAhead], buckets.size())], 1);
    const std::int64_t id = ids_[row];
    std::uint64_t at = frozen_home(id, buckets.size()), seen = 1;
    for (;; ++seen, at = at + 1 < buckets.size() ? at + 1 : 0) {
      FrozenBucket& bucket = buckets[at];
      if (std::find(bucket.ids, bucket.ids + bucket.used, id) != bucket.ids + bucket.used)
        throw std::invalid_argument("id " + std::to_string(id) + " came twice: an id has one row");
      if (bucket.used < FrozenBucket::kIds) {
        bucket.ids[bucket.used] = id;
        bucket.rows[bucket.used++] = static_cast<std::uint32_t>(row);
        break;
      }
      bucket.passed = 1;
    }
    longest = std::max(longest, seen);
  }
  return static_cast<std::uint32_t>(longest);
}

std::vector<std::byte> FrozenWriter::finish() {
  const auto wanted =
      static_cast<std::uint64_t>(std::ceil(static_cast<double>(ids_.size()) / (kLoad * FrozenBucket::kIds)));
  const std::uint64_t buckets = std::max<std::uint64_t>(wanted, 1);
  FrozenTrailer trailer{};
  trailer.magic = kFrozenEndMagic;
  trailer.rows = ids_.size();
  trailer.row_bytes = row_bytes_;
  trailer.buckets = buckets;
  trailer.index_at = frozen_padded(bytes_);
  trailer.checksums_at = trailer.index_at + buckets * sizeof(FrozenBucket);
  const std::size_t padding = trailer.index_at - bytes_;
  const std::size_t blocks = (trailer.checksums_at + kFrozenChecked - 1) / kFrozenChecked;
  const std::size_t about_bytes = segments_.size() * sizeof(FrozenSegment) + name_.size();
  trailer.about_at = trailer.checksums_at + frozen_padded(blocks * sizeof(std::uint32_t));
  trailer.file_bytes = trailer.about_at + frozen_padded(about_bytes) + sizeof trailer;
  trailer.segments = static_cast<std::uint32_t>(segments_.size());
  trailer.name_bytes = static_cast<std::uint32_t>(name_.size());
  trailer.version = kFrozenVersion;
  trailer.largest_error = largest_error_;
  trailer.mean_error = mean_error();

  std::vector<std::byte> tail(trailer.file_bytes - bytes_);
  const std::span<std::byte> all(tail);
  const auto part = [&](std::uint64_t at, std::size_t bytes) {
    return all.subspan(at - (trailer.index_at - padding), bytes);
  };
  std::vector<FrozenBucket> index(buckets, FrozenBucket{});
  trailer.longest = place_ids(index);
  std::memcpy(part(trailer.index_at, 0).data(), index.data(), buckets * sizeof(FrozenBucket));
  append(all.first(padding + buckets * sizeof(FrozenBucket)), true);

  const auto checksums = part(trailer.checksums_at, trailer.about_at - trailer.checksums_at);
  std::memcpy(checksums.data(), checksums_.data(), blocks * sizeof(std::uint32_t));
  trailer.checksums_crc = crc32c(checksums);
  const auto about = part(trailer.about_at, frozen_padded(about_bytes));
  std::memcpy(about.data(), segments_.data(), segments_.size() * sizeof(FrozenSegment));
  if (!name_.empty())
    std::memcpy(about.data() + segments_.size() * sizeof(FrozenSegment), name_.data(), name_.size());
  trailer.about_crc = crc32c(about);
  trailer.crc = crc32c(bytes_of(trailer).first(offsetof(FrozenTrailer, crc)));
  std::memcpy(all.last(sizeof trailer).data(), &trailer, sizeof trailer);
  append(all.subspan(padding + buckets * sizeof(FrozenBucket)), false);
  return tail;
}

}  // namespace monolith
