#include "frozen_table.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>
#include <utility>

#include "checksum.h"
#include "frozen_coding.h"
#include "prefetch.h"
#include "quantize.h"
#include "table_group.h"

namespace monolith {
namespace {

constexpr std::size_t kBlock = 256;   // ids that go through the stages together
constexpr std::size_t kAhead = 6;     // rows are asked for this long before they are copied
constexpr std::size_t kGrain = 2048;  // ids that are worth another thread
constexpr std::size_t kPage = 4096;

__extension__ using Wide = unsigned __int128;  // sums of what a file says cannot overflow

// Rows of `kBytes` as they are; 0 for any.
template <std::size_t kBytes>
void copy_rows(const std::byte* const* rows, std::size_t count, std::size_t any_bytes, float* out) {
  const std::size_t bytes = kBytes != 0 ? kBytes : any_bytes;
  auto* to = reinterpret_cast<std::byte*>(out);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch<0>(rows[i + kAhead], bytes);
    std::memcpy(to + i * bytes, rows[i], bytes);
  }
}

}  // namespace

void FrozenTable::refuse(std::uint64_t offset, const std::string& reason) const {
  throw FrozenDamage(path_, offset, reason);
}

FrozenTable::FrozenTable(std::span<const std::byte> file, std::shared_ptr<const void> owner, std::string path)
    : file_(file), owner_(std::move(owner)), path_(std::move(path)) {
  if (reinterpret_cast<std::uintptr_t>(file.data()) % kFrozenAlign != 0)
    throw std::invalid_argument("a frozen table must begin at a multiple of 64");
  open();
  read_about();
  rows_ = file_.data() + sizeof(FrozenHead);
  buckets_ = reinterpret_cast<const FrozenBucket*>(file_.data() + trailer_.index_at);
  no_row_.assign(trailer_.row_bytes, std::byte{0});
}

// Everything that has a fixed place, and whether it adds up to the file.
void FrozenTable::open() {
  const std::size_t size = file_.size(), least = sizeof(FrozenHead) + sizeof(FrozenTrailer);
  FrozenHead head;
  if (size >= sizeof head) std::memcpy(&head, file_.data(), sizeof head);
  if (size < sizeof head || head.magic != kFrozenMagic)
    refuse(0, "this is no table of rows to serve from: it does not begin with MONOFRZN");
  if (head.version != kFrozenVersion)
    refuse(8, "it is of format " + std::to_string(head.version) + ", this version reads format " +
                  std::to_string(kFrozenVersion));
  if (size < least || size % kFrozenAlign != 0)
    refuse(size, "the file was cut: it has " + std::to_string(size) + " bytes, which no complete one has");
  const std::size_t end = size - sizeof trailer_;
  std::memcpy(&trailer_, file_.data() + end, sizeof trailer_);
  if (trailer_.magic != kFrozenEndMagic) refuse(end, "the file was cut or is unfinished: it has no trailer");
  const auto sealed = file_.subspan(end, offsetof(FrozenTrailer, crc));
  if (crc32c(sealed) != trailer_.crc) refuse(end, "the trailer does not match its checksum");
  if (trailer_.version != kFrozenVersion || trailer_.file_bytes != size)
    refuse(end, "the trailer is that of a file of " + std::to_string(trailer_.file_bytes) +
                    " bytes, this one has " + std::to_string(size));
  const FrozenTrailer& t = trailer_;
  const Wide rows_end = sizeof(FrozenHead) + Wide{t.rows} * t.row_bytes;
  const Wide index_end = t.index_at + Wide{t.buckets} * sizeof(FrozenBucket);
  const Wide blocks = (Wide{t.checksums_at} + kFrozenChecked - 1) / kFrozenChecked;
  const Wide about = Wide{t.segments} * sizeof(FrozenSegment) + t.name_bytes;
  const auto padded = [](Wide bytes) { return (bytes + kFrozenAlign - 1) / kFrozenAlign * kFrozenAlign; };
  if (t.rows > kFrozenMaxRows || t.buckets < 1 || t.longest > t.buckets || padded(rows_end) != t.index_at ||
      index_end != t.checksums_at || padded(t.checksums_at + blocks * sizeof(std::uint32_t)) != t.about_at ||
      padded(t.about_at + about) != end)
    refuse(end, "the parts that the trailer names do not add up to the file");
  if (crc32c(file_.subspan(t.checksums_at, t.about_at - t.checksums_at)) != t.checksums_crc)
    refuse(t.checksums_at, "the list of checksums does not match its own");
  if (crc32c(file_.subspan(t.about_at, end - t.about_at)) != t.about_crc)
    refuse(t.about_at, "what the file says about its rows does not match its checksum");
}

// Segments and name; their lengths were checked.
void FrozenTable::read_about() {
  const FrozenTrailer& t = trailer_;
  if (t.segments < 1 || t.segments > kFrozenMaxSegments || t.name_bytes > kFrozenMaxName)
    refuse(t.about_at, "it has " + std::to_string(t.segments) + " segments and a name of " +
                           std::to_string(t.name_bytes) + " bytes");
  segments_.resize(t.segments);
  const std::byte* const at = file_.data() + t.about_at;
  std::memcpy(segments_.data(), at, t.segments * sizeof(FrozenSegment));
  name_.assign(reinterpret_cast<const char*>(at + t.segments * sizeof(FrozenSegment)), t.name_bytes);
  std::size_t begin = 0;
  for (const FrozenSegment& segment : segments_) {
    if (segment.dim < 1 || segment.dim > kFrozenMaxDim - dim_ || segment.coding > FrozenCoding::kInt4)
      refuse(t.about_at, "a segment has a width or coding that does not exist");
    // Neighbours of one coding are read in one go, unless each has its own scale.
    if (!frozen_scaled(segment.coding) && !steps_.empty() && steps_.back().coding == segment.coding)
      steps_.back().dim += segment.dim;
    else
      steps_.push_back({segment.coding, segment.dim, begin});
    begin += segment.bytes();
    dim_ += segment.dim;
  }
  if (frozen_row_bytes(segments_) != t.row_bytes)
    refuse(t.about_at, "rows of these segments have " + std::to_string(frozen_row_bytes(segments_)) +
                           " bytes, the trailer says " + std::to_string(t.row_bytes));
}

void FrozenTable::bound_memory(int descriptor, std::size_t row_bytes, std::shared_ptr<BlockReader> reader) {
  cache_ =
      std::make_unique<RowCache>(descriptor, RowCache::Layout{path_, sizeof(FrozenHead), trailer_.row_bytes},
                                 row_bytes, std::move(reader));
  index_.reset(new FrozenBucket[trailer_.buckets]);
  // Not through the mapping, whose pages would count as memory of this process, too.
  auto* const to = reinterpret_cast<std::byte*>(index_.get());
  for (std::size_t done = 0; done < index_bytes();) {
    const ssize_t got =
        pread(descriptor, to + done, index_bytes() - done, static_cast<off_t>(trailer_.index_at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category(), "read " + path_);
    if (got == 0) refuse(trailer_.index_at + done, "the file ends too early, it was cut since it was opened");
    done += static_cast<std::size_t>(got);
  }
  buckets_ = index_.get();
  madvise(const_cast<std::byte*>(file_.data()), file_.size(), MADV_RANDOM);  // what is left to read of it
}

RowCache::Stats FrozenTable::cache_stats() const {
  if (cache_ == nullptr) return {};
  RowCache::Stats stats = cache_->stats();
  stats.bytes += index_bytes();
  return stats;
}

// The row that one place of a bucket names.
inline const std::byte* FrozenTable::row_at(const FrozenBucket* at, std::uint32_t place) const {
  const std::uint32_t row = at->rows[place];
  if (row >= trailer_.rows) [[unlikely]]
    refuse(static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(at) - file_.data()),
           "the index names row " + std::to_string(row) + " of " + std::to_string(trailer_.rows) +
               "; verify the file, and export it again");
  return rows_ + row * trailer_.row_bytes;
}

inline const std::byte* FrozenTable::look(const FrozenBucket* at, std::int64_t id) const {
  unsigned match = 0;
  for (unsigned i = 0; i < FrozenBucket::kIds; ++i) match |= unsigned{at->ids[i] == id} << i;
  match &= (1u << std::min<unsigned>(at->used, FrozenBucket::kIds)) - 1;
  return match == 0 ? nullptr : row_at(at, static_cast<std::uint32_t>(std::countr_zero(match)));
}

// In the buckets after `at`, as long as they say that ids overflowed.
const std::byte* FrozenTable::look_on(const FrozenBucket* at, std::int64_t id) const {
  const FrozenBucket* const end = buckets_ + trailer_.buckets;
  for (std::uint32_t seen = 1; seen < trailer_.longest && at->passed != 0; ++seen) {
    if (++at == end) at = buckets_;
    if (const std::byte* row = look(at, id)) return row;
  }
  return nullptr;
}

void FrozenTable::decode(const std::byte* row, float* out) const {
  for (const Step& step : steps_) {
    const std::byte* const from = row + step.at;
    switch (step.coding) {
      case FrozenCoding::kFp32:
        std::memcpy(out, from, step.dim * sizeof(float));
        break;
      case FrozenCoding::kFp16:
        for (std::uint32_t i = 0; i < step.dim; ++i) {
          std::uint16_t half;
          std::memcpy(&half, from + 2 * i, sizeof half);
          out[i] = float_of(half);
        }
        break;
      case FrozenCoding::kInt8: {
        float scale;
        std::memcpy(&scale, from, sizeof scale);
        const auto* const codes = reinterpret_cast<const std::int8_t*>(from + sizeof scale);
        for (std::uint32_t i = 0; i < step.dim; ++i) out[i] = static_cast<float>(codes[i]) * scale;
        break;
      }
      case FrozenCoding::kInt4: {
        float scale;
        std::memcpy(&scale, from, sizeof scale);
        const auto* const codes = reinterpret_cast<const std::uint8_t*>(from + sizeof scale);
        for (std::uint32_t i = 0; i < step.dim; ++i) {
          const int code = codes[i / 2] >> (i % 2 * 4) & 15;  // -7 to 7 as 4 bits of two's complement
          out[i] = static_cast<float>((code ^ 8) - 8) * scale;
        }
        break;
      }
    }
    out += step.dim;
  }
}

// Up to kBlock ids of a call, which may belong to several tables.
class FrozenBatch {
 public:
  // Takes on ids of one table as long as there is room; returns how many.
  std::size_t take(const FrozenTable& table, const std::int64_t* ids, std::size_t count, float* out) {
    count = std::min(count, kBlock - size_);
    if (count == 0) return 0;
    parts_[num_parts_++] = {&table, ids, out, size_, size_ + count};
    for (std::size_t i = 0; i < count; ++i) {
      const FrozenBucket* const bucket = table.home(ids[i]);
      __builtin_prefetch(bucket);
      buckets_[size_ + i] = bucket;
    }
    size_ += count;
    return count;
  }
  std::size_t size() const { return size_; }
  bool full() const { return size_ == kBlock; }

  // What the index says, with the first rows asked for.
  void find() {
    for (std::size_t p = 0; p < num_parts_; ++p) {
      const Part& part = parts_[p];
      const FrozenTable& table = *part.table;
      std::uint16_t late[kBlock];
      std::size_t late_count = 0;
      for (std::size_t i = part.begin; i < part.end; ++i) {
        const std::byte* row = table.look(buckets_[i], part.ids[i - part.begin]);
        if (row == nullptr) {
          row = table.no_row_.data();
          if (buckets_[i]->passed != 0) [[unlikely]] {
            __builtin_prefetch(buckets_[i] + 1);
            late[late_count++] = static_cast<std::uint16_t>(i);
          }
        }
        rows_[i] = row;
      }
      for (std::size_t l = 0; l < late_count; ++l) {
        const std::size_t i = late[l];
        if (const std::byte* row = table.look_on(buckets_[i], part.ids[i - part.begin])) rows_[i] = row;
      }
      if (table.cache_ != nullptr) continue;
      for (std::size_t i = part.begin; i < std::min(part.end, part.begin + kAhead); ++i)
        prefetch<0>(rows_[i], table.trailer_.row_bytes);
    }
    load();
  }

  // The rows into the caller's floats. Leaves the batch empty.
  void copy() {
    for (std::size_t p = 0; p < num_parts_; ++p) copy_part(parts_[p]);
    num_parts_ = size_ = 0;
  }

 private:
  struct Part {
    const FrozenTable* table;
    const std::int64_t* ids;
    float* out;
    std::size_t begin, end;
  };

  // Has the rows of tables that are bounded in `loaded_`: from their caches, and all others from disk at
  // once.
  void load() {
    std::size_t bytes = 0;
    for (std::size_t p = 0; p < num_parts_; ++p)
      if (parts_[p].table->cache_ != nullptr)
        bytes += (parts_[p].end - parts_[p].begin) * parts_[p].table->trailer_.row_bytes;
    if (bytes == 0) return;
    loaded_.resize(bytes);
    misses_.clear();
    std::byte* into = loaded_.data();
    for (std::size_t p = 0; p < num_parts_; ++p) {
      const Part& part = parts_[p];
      const FrozenTable& table = *part.table;
      if (table.cache_ == nullptr) continue;
      const std::size_t row_bytes = table.trailer_.row_bytes;
      // Rows of the last page, if that is not a whole one, are read where they are mapped.
      const std::byte* const whole =
          table.file_.data() + table.file_.size() / RowCache::kPage * RowCache::kPage;
      std::size_t found = 0;
      const std::size_t missed = misses_.size();
      for (std::size_t i = part.begin; i < part.end; ++i) {
        if (rows_[i] == table.no_row_.data()) continue;
        ++found;
        if (rows_[i] + row_bytes > whole) continue;
        const auto row =
            static_cast<std::uint32_t>(static_cast<std::size_t>(rows_[i] - table.rows_) / row_bytes);
        if (!table.cache_->recall(row, into)) misses_.push_back({table.cache_.get(), row, into});
        rows_[i] = into;
        into += row_bytes;
      }
      table.cache_->count(found, found - (misses_.size() - missed));
    }
    RowCache::fetch(misses_);
  }

  void copy_part(const Part& part) const {
    const FrozenTable& table = *part.table;
    const std::byte* const* rows = rows_ + part.begin;
    const std::size_t count = part.end - part.begin, bytes = table.trailer_.row_bytes;
    if (table.steps_.size() == 1 && table.steps_[0].coding == FrozenCoding::kFp32) {
      switch (bytes) {
        case 32:
          return copy_rows<32>(rows, count, bytes, part.out);
        case 64:
          return copy_rows<64>(rows, count, bytes, part.out);
        case 68:  // a bias and a vector of 16
          return copy_rows<68>(rows, count, bytes, part.out);
        case 128:
          return copy_rows<128>(rows, count, bytes, part.out);
        default:
          return copy_rows<0>(rows, count, bytes, part.out);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) prefetch<0>(rows[i + kAhead], bytes);
      table.decode(rows[i], part.out + i * table.dim_);
    }
  }

  Part parts_[kBlock];
  std::size_t num_parts_ = 0, size_ = 0;
  const FrozenBucket* buckets_[kBlock];
  const std::byte* rows_[kBlock];
  std::vector<std::byte> loaded_;
  std::vector<RowCache::Miss> misses_;
};

namespace {

// Reads ids `begin` to `end` of a call over many tables. While the rows of one block are on their way, the
// index lines of the next are asked for.
template <class TableOf>
void read_range(const TableOf& table_of, std::span<const std::int64_t> id_offsets,
                std::span<const std::int64_t> float_offsets, const std::int64_t* ids, float* out,
                std::size_t begin, std::size_t end) {
  FrozenBatch batches[2];
  FrozenBatch* now = &batches[0];
  FrozenBatch* next = &batches[1];
  std::size_t piece = static_cast<std::size_t>(
      std::upper_bound(id_offsets.begin(), id_offsets.end(), static_cast<std::int64_t>(begin)) -
      id_offsets.begin() - 1);
  std::size_t at = begin;
  const auto fill = [&](FrozenBatch& batch) {
    while (at < end && !batch.full()) {
      while (at >= static_cast<std::size_t>(id_offsets[piece + 1])) ++piece;
      const FrozenTable& table = table_of(piece);
      const std::size_t first = static_cast<std::size_t>(id_offsets[piece]);
      const std::size_t last = std::min(end, static_cast<std::size_t>(id_offsets[piece + 1]));
      at += batch.take(table, ids + at, last - at, out + float_offsets[piece] + (at - first) * table.dim());
    }
  };
  for (fill(*now); now->size() > 0; std::swap(now, next)) {
    now->find();
    fill(*next);
    now->copy();
  }
}

}  // namespace

void FrozenTable::lookup(std::span<const std::int64_t> ids, float* out) const {
  const std::int64_t ends[2] = {0, static_cast<std::int64_t>(ids.size())};
  const std::int64_t floats[1] = {0};
  read_range([this](std::size_t) -> const FrozenTable& { return *this; }, ends, floats, ids.data(), out, 0,
             ids.size());
}

const std::byte* FrozenTable::find(std::int64_t id) const {
  const FrozenBucket* const bucket = home(id);
  const std::byte* const row = look(bucket, id);
  return row != nullptr ? row : look_on(bucket, id);
}

void FrozenTable::contains(std::span<const std::int64_t> ids, std::uint8_t* found) const {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(home(ids[i + kAhead]));
    found[i] = find(ids[i]) != nullptr;
  }
}

void FrozenTable::matches(std::span<const std::int64_t> ids, const float* values, std::uint8_t* same) const {
  std::vector<std::byte> coded(trailer_.row_bytes);
  for (std::size_t i = 0; i < ids.size(); ++i, values += dim_) {
    if (i + kAhead < ids.size()) __builtin_prefetch(home(ids[i + kAhead]));
    const std::byte* const row = find(ids[i]);
    same[i] = 0;
    if (row == nullptr || !std::all_of(values, values + dim_, [](float one) { return std::isfinite(one); }))
      continue;
    frozen_encode(segments_, values, coded.data(), coded.size(), [](float, float) {});
    same[i] = std::memcmp(coded.data(), row, coded.size()) == 0;
  }
}

FrozenTable::Scanned FrozenTable::scan(std::uint64_t first, std::uint64_t last) const {
  const auto place = [this](std::uint64_t hash) {
    return static_cast<std::uint64_t>(static_cast<Wide>(hash) * trailer_.buckets >> 64);
  };
  Scanned all;
  if (last < first) return all;
  // An id that found no room in its bucket is in one of the next, which may be the first ones.
  const std::uint64_t begin = place(first), past = place(last) + std::max<std::uint64_t>(trailer_.longest, 1);
  const std::uint64_t count = std::min(past - begin, trailer_.buckets);
  for (std::uint64_t i = 0; i < count; ++i) {
    const FrozenBucket& bucket = buckets_[(begin + i) % trailer_.buckets];
    for (std::uint32_t j = 0; j < std::min<std::uint32_t>(bucket.used, FrozenBucket::kIds); ++j) {
      const std::uint64_t hash = mix(bucket.ids[j]);
      if (hash < first || hash > last) continue;
      all.ids.push_back(bucket.ids[j]);
      all.values.resize(all.values.size() + dim_);
      decode(row_at(&bucket, j), all.values.data() + all.values.size() - dim_);
    }
  }
  return all;
}

void FrozenTable::verify(std::size_t from, std::size_t bytes) const {
  const std::size_t all = checked_bytes();
  const auto* const checksums = reinterpret_cast<const std::uint32_t*>(file_.data() + trailer_.checksums_at);
  const std::size_t end = std::min(all, bytes > all ? all : from + bytes);
  for (std::size_t at = from / kFrozenChecked * kFrozenChecked; at < end; at += kFrozenChecked)
    if (crc32c(file_.subspan(at, std::min(kFrozenChecked, all - at))) != checksums[at / kFrozenChecked])
      refuse(at, "the bytes from here to " + std::to_string(std::min(all, at + kFrozenChecked)) +
                     " do not match their checksum");
}

void FrozenTable::prefault(std::size_t from, std::size_t bytes) const {
  from = std::min(from / kPage * kPage, file_.size());
  bytes = std::min(bytes, file_.size() - from);
  if (bytes == 0) return;
#ifdef MADV_POPULATE_READ
  if (madvise(const_cast<std::byte*>(file_.data() + from), bytes, MADV_POPULATE_READ) == 0) return;
#endif
  for (std::size_t at = from; at < from + bytes; at += kPage)
    static_cast<void>(*static_cast<const volatile std::byte*>(file_.data() + at));
}

FrozenGroup::FrozenGroup(std::vector<std::shared_ptr<const FrozenTable>> tables,
                         std::shared_ptr<Workers> workers)
    : tables_(std::move(tables)), workers_(std::move(workers)) {
  for (const auto& table : tables_) {
    if (table == nullptr) throw std::invalid_argument("a group needs tables, got none in its place");
    dims_.push_back(static_cast<std::int64_t>(table->dim()));
  }
}

void FrozenGroup::lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> sizes,
                         std::size_t num_batches, std::span<float> out) const {
  const FusedOffsets at = fused_offsets(dims_, sizes, num_batches, ids.size());
  if (out.size() != static_cast<std::size_t>(at.floats.back()))
    throw std::invalid_argument("out must hold dim floats per id: expected " +
                                std::to_string(at.floats.back()) + ", got " + std::to_string(out.size()));
  const auto table_of = [&](std::size_t piece) -> const FrozenTable& {
    return *tables_[piece % tables_.size()];
  };
  const auto read = [&](std::size_t begin, std::size_t end) {
    read_range(table_of, at.ids, at.floats, ids.data(), out.data(), begin, end);
  };
  const std::size_t tasks = (ids.size() + kGrain - 1) / kGrain;
  if (workers_ == nullptr || tasks < 2) return read(0, ids.size());
  workers_->run(tasks,
                [&](std::size_t task) { read(task * kGrain, std::min(ids.size(), (task + 1) * kGrain)); });
}

}  // namespace monolith
