#include "cold_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <random>
#include <system_error>
#include <utility>

#include "checksum.h"
#include "hash.h"

namespace monolith {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBlockHead = 16;
constexpr std::size_t kMostAtOnce = 64 << 10;               // one read of blocks that follow each other
constexpr std::size_t kStreamBytes = std::size_t{1} << 20;  // one write, and one read of a whole file
constexpr std::size_t kLocked = 4096;                       // IDs that are looked up under one lock
constexpr std::size_t kMoved = 1024;                        // rows that the thread moves under one lock
constexpr std::size_t kHeads = 65536;                       // of a buffer that are copied at once
constexpr std::size_t kVisited = 1 << 18;                   // entries that a scan goes over under one lock
constexpr std::size_t kAhead = 16;
constexpr char kMagic[8] = {'M', 'O', 'N', 'O', 'C', 'O', 'L', 'D'};
constexpr std::uint32_t kVersion = 1;

// Between two turns with a lock. A thread that waits for it needs a moment to wake up, and would find it
// taken again.
void give_way() {
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

std::size_t rounded(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// 4 KiB, or what makes less than a tenth of a block useless.
std::size_t block_for(std::size_t record) {
  std::size_t block = rounded(record + kBlockHead, kPage);
  if (record <= kPage / 10) return kPage;
  while ((block - kBlockHead) % record > block / 10) block += kPage;
  return block;
}

struct BlockHead {
  std::uint32_t checksum;  // of all that follows it in the block
  std::uint32_t stamp;
  std::uint64_t number;
};
static_assert(sizeof(BlockHead) == kBlockHead);

struct FileHead {
  char magic[8];
  std::uint32_t version;
  std::uint32_t record_bytes;
  std::uint64_t block_bytes;
  std::uint64_t rows;
  std::uint64_t row_blocks;
  std::uint64_t directory_blocks;
  std::uint64_t number;
  std::uint32_t oldest, newest;  // event times
  std::uint32_t name_bytes;      // of the table's name, which follows
  std::uint32_t zero;
};

void put_epoch(std::byte* record, std::uint32_t epoch) {
  std::memcpy(record + offsetof(RecordHead, epoch), &epoch, sizeof(epoch));
}

bool is_block(const std::byte* bytes, std::size_t block_bytes, std::uint32_t stamp, std::uint64_t number) {
  BlockHead head;
  std::memcpy(&head, bytes, sizeof(head));
  return head.stamp == stamp && head.number == number &&
         head.checksum == crc32c({bytes + sizeof(head.checksum), block_bytes - sizeof(head.checksum)});
}

}  // namespace

ColdLayout::ColdLayout(std::size_t row_bytes)
    : record_bytes(sizeof(RecordHead) + row_bytes),
      block_bytes(block_for(record_bytes)),
      rows_per_block((block_bytes - kBlockHead) / record_bytes),
      heads_per_block((block_bytes - kBlockHead) / sizeof(RecordHead)) {}

std::int64_t first_bad_block(std::span<const std::byte> blocks, std::size_t block_bytes, std::uint32_t stamp,
                             std::uint64_t number) {
  if (block_bytes <= kBlockHead || blocks.size() % block_bytes != 0)
    throw std::invalid_argument("cold blocks: not a number of whole blocks");
  for (std::size_t i = 0; i < blocks.size() / block_bytes; ++i)
    if (!is_block(blocks.data() + i * block_bytes, block_bytes, stamp, number + i))
      return static_cast<std::int64_t>(i);
  return -1;
}

struct ColdStore::File {
  std::uint64_t number = 0;    // unique in its store
  std::uint64_t sequence = 0;  // that of the buffer it was written from: what was there at a snapshot
  std::uint32_t slot = 0;      // the high bits of its rows' locations
  std::size_t rows = 0;
  std::size_t live = 0;  // guarded by the store, as `ripe`
  bool ripe = false;
  std::uint32_t oldest = std::numeric_limits<std::uint32_t>::max(), newest = 0;
  std::unique_ptr<std::byte[]> buffer;  // its records, until they are written as another file
  std::string path;
  int descriptor = -1;
  std::uint32_t stamp = 0;
  std::uint64_t row_blocks = 0, directory_blocks = 0;
  std::uint32_t newest_epoch = 0;  // of its records
  bool adopted = false;            // another process wrote it: newest_epoch is that of all, whatever they say
  bool linked = false;             // among the links of the open snapshot
  bool filling = false;            // rows are on their way to it, from a buffer

  File() = default;
  File(const File&) = delete;
  ~File() {
    if (descriptor < 0) return;
    ::close(descriptor);
    ::unlink(path.c_str());
  }
};

ColdStore::ColdStore(ColdSpec spec, std::shared_ptr<BlockReader> reader)
    : spec_(std::move(spec)),
      reader_(std::move(reader)),
      record_bytes_(ColdLayout(spec_.row_bytes).record_bytes),
      block_bytes_(ColdLayout(spec_.row_bytes).block_bytes),
      rows_per_block_(ColdLayout(spec_.row_bytes).rows_per_block),
      rows_per_file_(std::clamp<std::size_t>(spec_.buffer_bytes / record_bytes_, 8, kRowMask)),
      recent_(record_bytes_) {
  if (spec_.row_bytes == 0 || spec_.row_bytes % 8 != 0)
    throw std::invalid_argument("cold store: rows must be of a multiple of 8 bytes");
  if (reader_ == nullptr) throw std::invalid_argument("cold store: needs a reader");
  files_.emplace_back();  // location 0 is no row
  captured_.resize(std::size_t{1} << ColdIndex::kPartitionBits);
  remember_up_to(spec_.recent_bytes);
  thread_ = std::thread([this] { serve(); });
}

ColdStore::~ColdStore() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  thread_.join();
}

std::size_t ColdStore::size() const {
  std::lock_guard lock(mutex_);
  return index_.size();
}

ColdStats ColdStore::stats() const {
  std::lock_guard lock(mutex_);
  ColdStats found = counts_;
  found.rows = index_.size();
  found.bytes_index = index_.bytes();
  for (const auto& captured : captured_) found.bytes_index += captured.capacity() * sizeof(std::uint64_t);
  {
    std::lock_guard held(recent_mutex_);
    found.bytes_recent = recent_.bytes();
  }
  const auto count = [&](const File& file) {
    if (file.buffer != nullptr) {
      found.bytes_buffers += rows_per_file_ * record_bytes_;
    } else {
      ++found.files;
      found.bytes_files += (1 + file.row_blocks + file.directory_blocks) * block_bytes_;
      found.bytes_live += file.live * record_bytes_;
    }
  };
  for (const auto& file : files_)
    if (file != nullptr) count(*file);
  return found;
}

std::string ColdStore::trouble() const {
  std::lock_guard lock(mutex_);
  return trouble_;
}

// ---- files and buffers: with mutex_ held ---------------------------------------------------------

std::shared_ptr<ColdStore::File> ColdStore::add_file() {
  auto file = std::make_shared<File>();
  file->number = file->sequence = next_number_++;
  if (free_slots_.empty()) {
    if (files_.size() >> (ColdIndex::kLocationBits - kRowBits) != 0)
      throw std::runtime_error(
          "cold store: too many files; give the table more memory_bytes, for larger ones");
    file->slot = static_cast<std::uint32_t>(files_.size());
    files_.push_back(file);
  } else {
    file->slot = free_slots_.back();
    free_slots_.pop_back();
    files_[file->slot] = file;
  }
  return file;
}

bool ColdStore::of_snapshot(const File& file) const {
  return snapshot_open_ && file.sequence < mark_;
}

// Entries of a snapshot may lead to it: then it stays until that is closed. To remove a file, or the memory
// of a buffer, may take long.
void ColdStore::release(const std::shared_ptr<File>& file) {
  if (std::exchange(file->ripe, false)) --ripe_;
  if (of_snapshot(*file)) {
    kept_.push_back(file);
    return;
  }
  free_slots_.push_back(file->slot);
  dead_.push_back(std::move(files_[file->slot]));
  work_.notify_all();
}

const std::byte* ColdStore::in_memory(std::uint64_t location) const {
  const File& file = *files_[location >> kRowBits];
  return file.buffer != nullptr ? file.buffer.get() + (location & kRowMask) * record_bytes_ : nullptr;
}

void ColdStore::seal() {
  if (open_ == nullptr) return;
  sealed_.push_back(std::move(open_));
  open_ = nullptr;
  work_.notify_all();
}

void ColdStore::put(const std::byte* record) {
  if (open_ == nullptr) {
    open_ = add_file();
    open_->buffer.reset(new std::byte[rows_per_file_ * record_bytes_]);
  }
  const std::uint64_t row = open_->rows++;
  std::memcpy(open_->buffer.get() + row * record_bytes_, record, record_bytes_);
  const RecordHead head = head_at(record);
  open_->oldest = std::min(open_->oldest, head.time);
  open_->newest = std::max(open_->newest, head.time);
  ++open_->live;
  index_.insert(head.hash, std::uint64_t{open_->slot} << kRowBits | row);
  if (open_->rows == rows_per_file_) seal();
}

// Whether the entry was there.
bool ColdStore::erase(std::uint64_t hash, std::uint64_t location) {
  if (!index_.erase(hash, location)) return false;
  const std::shared_ptr<File> file = files_[location >> kRowBits];
  if (of_snapshot(*file))
    captured_[ColdIndex::partition_of(hash)].push_back(ColdIndex::tag_of(hash) << ColdIndex::kLocationBits |
                                                       location);
  --file->live;
  if (file->buffer != nullptr || file->filling) return true;
  if (file->live == 0) {
    release(file);
  } else if (!file->ripe && 2 * file->live < file->rows) {
    file->ripe = true;
    ++ripe_;
    work_.notify_all();
  }
  return true;
}

// ---- what changes rows ---------------------------------------------------------------------------

void ColdStore::append(std::span<const std::byte> records) {
  for (std::size_t at = 0; at < records.size();) {
    std::lock_guard lock(mutex_);
    const std::size_t end = std::min(records.size(), at + kLocked * record_bytes_);
    for (; at < end; at += record_bytes_) {
      if (at + kAhead * record_bytes_ < records.size())
        index_.prefetch(hash_at(records.data() + at + kAhead * record_bytes_));
      put(records.data() + at);
    }
  }
}

bool ColdStore::wait_for_room(double seconds) {
  std::unique_lock lock(mutex_);
  return done_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return sealed_.empty() ||
           (sealed_.size() == 1 && (open_ == nullptr || 2 * open_->rows <= rows_per_file_));
  });
}

void ColdStore::flush() {
  std::unique_lock lock(mutex_);
  seal();
  done_.wait(lock, [&] {
    return stopping_ || (sealed_.empty() && dead_.empty() && !busy_ && (ripe_ == 0 || snapshot_open_));
  });
}

std::size_t ColdStore::forget(std::span<const std::uint64_t> hashes, const std::uint64_t* locations,
                              std::vector<std::uint64_t>* gone) {
  std::size_t count = 0;
  for (std::size_t at = 0; at < hashes.size();) {
    std::lock_guard lock(mutex_);
    for (const std::size_t end = std::min(hashes.size(), at + kLocked); at < end; ++at) {
      if (at + kAhead < hashes.size()) index_.prefetch(hashes[at + kAhead]);
      if (locations[at] == 0 || !erase(hashes[at], locations[at])) continue;
      ++count;
      if (gone != nullptr) gone->push_back(hashes[at]);
    }
  }
  return count;
}

void ColdStore::clear() {
  const std::lock_guard still(moves_);
  std::lock_guard lock(mutex_);
  if (snapshot_open_) throw std::invalid_argument("clear: a snapshot of this table is open; close it first");
  index_.clear();
  open_ = nullptr;
  sealed_.clear();
  for (std::size_t slot = 1; slot < files_.size(); ++slot)
    if (const std::shared_ptr<File> file = files_[slot]) {
      file->live = 0;
      release(file);
    }
  done_.notify_all();
}

void ColdStore::open_snapshot() {
  std::lock_guard lock(mutex_);
  if (snapshot_open_) throw std::invalid_argument("table: a snapshot is open already; close it first");
  seal();
  mark_ = next_number_;
  snapshot_open_ = true;
}

void ColdStore::close_snapshot() {
  std::lock_guard lock(mutex_);
  if (!std::exchange(snapshot_open_, false)) return;
  for (auto& captured : captured_) captured = {};
  for (const std::shared_ptr<File>& file : std::exchange(kept_, {})) release(file);
  for (const std::shared_ptr<File>& file : files_)
    if (file != nullptr) file->linked = false;
  links_chosen_ = false;
  work_.notify_all();  // compaction waited for this
}

std::vector<ColdLink> ColdStore::links() {
  struct Alive {
    std::shared_ptr<File> file;
    std::vector<std::uint8_t> bits;
    std::uint64_t count = 0;
  };
  std::vector<Alive> found;
  std::vector<std::uint32_t> places;  // among `found`, plus 1, by slot
  {
    std::lock_guard lock(mutex_);
    if (!snapshot_open_) throw std::invalid_argument("links: the snapshot was closed");
    places.resize(files_.size());
    for (const std::shared_ptr<File>& file : files_) {
      if (file == nullptr || file->buffer != nullptr || !of_snapshot(*file)) continue;
      // Rows may still be on their way to it, from its buffer.
      const bool filling = std::any_of(sealed_.begin(), sealed_.end(), [&](const auto& sealed) {
        return sealed->sequence == file->sequence;
      });
      if (links_chosen_ ? !file->linked : filling) continue;
      found.push_back({file, std::vector<std::uint8_t>((file->rows + 7) / 8)});
      places[file->slot] = static_cast<std::uint32_t>(found.size());
    }
  }
  // From now on no row of these files changes its location: compaction waits for the snapshot. A row that
  // goes is remembered.
  for (std::size_t part = 0; part < captured_.size(); ++part) {
    std::lock_guard lock(mutex_);
    if (!snapshot_open_) throw std::invalid_argument("links: the snapshot was closed");
    const auto note = [&](std::uint64_t entry) {
      const std::uint64_t location = entry & ColdIndex::kLocationMask;
      const std::uint64_t slot = location >> kRowBits;
      if (slot >= places.size() || places[slot] == 0) return true;
      Alive& alive = found[places[slot] - 1];
      const std::uint64_t row = location & kRowMask;
      alive.bits[row / 8] |= static_cast<std::uint8_t>(1 << row % 8);
      ++alive.count;
      return true;
    };
    index_.walk(part, 0, note);
    for (const std::uint64_t entry : captured_[part]) note(entry);
  }
  std::lock_guard lock(mutex_);
  std::vector<ColdLink> links;
  for (Alive& alive : found) {
    if (!links_chosen_ && 2 * alive.count < alive.file->rows) continue;
    alive.file->linked = true;
    links.push_back({alive.file->path, alive.file->rows, alive.count, std::move(alive.bits)});
  }
  links_chosen_ = true;
  return links;
}

std::size_t ColdStore::adopt(const std::string& path, std::span<const std::uint8_t> alive,
                             std::uint32_t epoch,
                             const std::function<void(std::span<const RecordHead>)>& each) {
  auto file = std::make_shared<File>();
  file->path = path;
  constexpr int kHow = O_RDONLY | O_NOFOLLOW | O_CLOEXEC;
  file->descriptor = ::open(path.c_str(), kHow | O_DIRECT);
  if (file->descriptor < 0 && errno == EINVAL) file->descriptor = ::open(path.c_str(), kHow);
  if (file->descriptor < 0)
    throw ColdDamage(path, 0, std::string("it cannot be opened: ") + std::strerror(errno));
  const std::size_t at_once = std::max<std::size_t>(kStreamBytes / block_bytes_, 1);
  const Aligned memory = aligned(at_once * block_bytes_);
  BlockReader::Read read{file->descriptor, 0, block_bytes_, memory.get()};
  reader_->run({&read, 1});
  BlockHead first;
  FileHead head;
  std::memcpy(&first, memory.get(), sizeof(first));
  std::memcpy(&head, memory.get() + kBlockHead, sizeof(head));
  if (read.error != 0 || !is_block(memory.get(), block_bytes_, first.stamp, 0) ||
      std::memcmp(head.magic, kMagic, sizeof(kMagic)) != 0 || head.version != kVersion)
    throw ColdDamage(path, 0, "its first block is not that of a file of cold rows");
  const std::size_t per_block = (block_bytes_ - kBlockHead) / sizeof(RecordHead);
  if (head.record_bytes != record_bytes_ || head.block_bytes != block_bytes_ || head.rows > kRowMask ||
      head.row_blocks != (head.rows + rows_per_block_ - 1) / rows_per_block_ ||
      head.directory_blocks != (head.rows + per_block - 1) / per_block || alive.size() != (head.rows + 7) / 8)
    throw ColdDamage(path, 0, "it has rows of another size, or another number of them");
  file->stamp = first.stamp;
  file->rows = head.rows;
  file->row_blocks = head.row_blocks;
  file->directory_blocks = head.directory_blocks;
  file->oldest = head.oldest;
  file->newest = head.newest;
  file->newest_epoch = epoch;
  file->adopted = true;
  {
    std::lock_guard lock(mutex_);
    const std::shared_ptr<File> placed = add_file();
    file->number = file->sequence = placed->number;
    file->slot = placed->slot;
    files_[file->slot] = file;
  }
  const std::uint64_t base = std::uint64_t{file->slot} << kRowBits;
  std::vector<RecordHead> heads, taken;
  std::uint64_t before = 0;
  for (std::size_t row = 0; row < file->rows; row += heads.size()) {
    read_heads(*file, row, memory.get(), heads);
    taken.clear();
    for (std::size_t at = 0; at < heads.size();) {
      std::lock_guard lock(mutex_);
      for (const std::size_t end = std::min(heads.size(), at + kLocked); at < end; ++at) {
        const std::uint64_t number = row + at;
        if (number > 0 && heads[at].hash <= before)
          throw ColdDamage(path, (1 + file->row_blocks + number / per_block) * block_bytes_,
                           "its directory is not in the order of hashes");
        before = heads[at].hash;
        if (at + kAhead < heads.size()) index_.prefetch(heads[at + kAhead].hash);
        if ((alive[number / 8] >> number % 8 & 1) == 0) continue;
        index_.insert(heads[at].hash, base + number);
        ++file->live;
        taken.push_back(heads[at]);
      }
    }
    each(taken);
  }
  std::lock_guard lock(mutex_);
  const std::size_t live = file->live;
  if (live == 0) {
    release(file);
  } else if (2 * live < file->rows) {
    file->ripe = true;
    ++ripe_;
    work_.notify_all();
  }
  return live;
}

// ---- reading -------------------------------------------------------------------------------------

std::uint64_t ColdStore::key_of(const File& file, std::uint64_t location) const {
  return file.number << kRowBits | (location & kRowMask);
}

void ColdStore::remember_up_to(std::size_t bytes) {
  std::lock_guard lock(recent_mutex_);
  recent_.resize(bytes / recent_.row_cost());
}

void ColdStore::check(const File& file, std::uint64_t block, const std::byte* bytes,
                      std::span<const Wanted> wanted) const {
  if (is_block(bytes, block_bytes_, file.stamp, block)) return;
  BlockHead head;
  std::memcpy(&head, bytes, sizeof(head));
  const std::uint32_t sum = crc32c({bytes + sizeof(head.checksum), block_bytes_ - sizeof(head.checksum)});
  std::string reason = head.checksum != sum ? "the checksum of a block does not match its content"
                                            : "a block is not the one that was written here";
  reason += " (table '" + spec_.table + "', rows of IDs ";
  for (std::size_t i = 0; i < wanted.size() && i < 3; ++i)
    reason += (i > 0 ? ", " : "") + std::to_string(unmix(wanted[i].hash));
  reason += wanted.size() > 3 ? ", ...)" : wanted.empty() ? "unknown)" : ")";
  throw ColdDamage(file.path, block * block_bytes_, reason);
}

template <class Each>
void ColdStore::fetch(std::vector<Wanted>& wanted, const Files& files, Each&& each) {
  if (wanted.empty()) return;
  std::sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) {
    return a.file != b.file ? a.file < b.file : a.location < b.location;
  });
  const auto block_of = [&](const Wanted& one) { return 1 + (one.location & kRowMask) / rows_per_block_; };
  std::vector<BlockReader::Read> reads;
  std::vector<std::size_t> firsts;  // of each read, in `wanted`; and the end
  std::uint64_t read_bytes = 0;
  for (std::size_t at = 0; at < wanted.size(); ++at) {
    const int descriptor = files[wanted[at].file]->descriptor;
    const std::uint64_t offset = block_of(wanted[at]) * block_bytes_;
    if (!reads.empty() && reads.back().descriptor == descriptor) {
      BlockReader::Read& last = reads.back();
      const std::uint64_t end = last.offset + last.bytes;
      if (offset < end) continue;  // the block of the one before
      if (offset == end && last.bytes + block_bytes_ <= kMostAtOnce) {
        last.bytes += block_bytes_;
        read_bytes += block_bytes_;
        continue;
      }
    }
    reads.push_back({descriptor, offset, block_bytes_, nullptr});
    firsts.push_back(at);
    read_bytes += block_bytes_;
  }
  firsts.push_back(wanted.size());
  reader_->run(reads, [&](std::size_t number, const std::byte* bytes) {
    const BlockReader::Read& read = reads[number];
    const File& file = *files[wanted[firsts[number]].file];
    if (read.error != 0)
      throw ColdDamage(file.path, read.offset,
                       read.error < 0 ? "the file ends too early"
                                      : std::string("it cannot be read: ") + std::strerror(read.error));
    for (std::size_t at = firsts[number]; at < firsts[number + 1];) {
      const std::uint64_t block = block_of(wanted[at]);
      const std::byte* const found = bytes + (block * block_bytes_ - read.offset);
      std::size_t end = at;
      while (end < firsts[number + 1] && block_of(wanted[end]) == block) ++end;
      check(file, block, found, std::span(wanted).subspan(at, end - at));
      for (; at < end; ++at)
        each(wanted[at],
             found + kBlockHead + (wanted[at].location & kRowMask) % rows_per_block_ * record_bytes_);
    }
  });
  std::lock_guard lock(mutex_);
  counts_.reads += reads.size();
  counts_.bytes_read += read_bytes;
}

void ColdStore::read(std::span<const std::uint64_t> hashes, std::byte* records, std::uint64_t* locations,
                     bool keep) {
  std::vector<Wanted> wanted;
  Files files;
  std::vector<std::uint32_t> places;  // of files among `files`, plus 1, by slot
  std::uint64_t found = 0, recent = 0;
  for (std::size_t at = 0; at < hashes.size();) {
    std::lock_guard lock(mutex_);
    std::lock_guard also(recent_mutex_);
    for (const std::size_t end = std::min(hashes.size(), at + kLocked); at < end; ++at) {
      if (at + kAhead < hashes.size()) index_.prefetch(hashes[at + kAhead]);
      locations[at] = 0;
      index_.candidates(hashes[at], [&](std::uint64_t location) {
        const std::shared_ptr<File>& file = files_[location >> kRowBits];
        std::byte* const into = records + at * record_bytes_;
        const std::byte* held = in_memory(location);
        if (held == nullptr) held = recent_.find(key_of(*file, location));
        if (held != nullptr) {
          if (hash_at(held) != hashes[at]) return;  // another ID with the same tag
          std::memcpy(into, held, record_bytes_);
        } else {
          places.resize(files_.size());
          std::uint32_t& place = places[file->slot];
          // A slot may have another file by now: this call releases its lock at times.
          if (place == 0 || files[place - 1] != file) {
            files.push_back(file);
            place = static_cast<std::uint32_t>(files.size());
          }
          wanted.push_back({location, hashes[at], static_cast<std::uint32_t>(at), place - 1});
          return;
        }
        locations[at] = location;
        ++found;
        ++recent;
      });
    }
  }
  fetch(wanted, files, [&](const Wanted& one, const std::byte* record) {
    if (hash_at(record) != one.hash) return;  // another ID with the same tag
    std::byte* const into = records + one.position * record_bytes_;
    std::memcpy(into, record, record_bytes_);
    if (files[one.file]->adopted) put_epoch(into, files[one.file]->newest_epoch);
    locations[one.position] = one.location;
  });
  for (std::size_t at = 0; at < wanted.size();) {
    std::lock_guard lock(recent_mutex_);
    for (const std::size_t end = std::min(wanted.size(), at + kLocked); at < end; ++at) {
      const Wanted& one = wanted[at];
      if (locations[one.position] != one.location) continue;
      ++found;
      if (!keep) continue;
      recent_.put(key_of(*files[one.file], one.location), records + one.position * record_bytes_);
      remembered_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  std::lock_guard lock(mutex_);
  counts_.rows_found += found;
  counts_.rows_recent += recent;
}

ColdChunk ColdStore::scan(std::uint64_t cursor, std::uint64_t last, std::size_t limit, bool of_snap,
                          bool unlinked, std::uint32_t since) {
  ColdChunk chunk;
  std::vector<Wanted> wanted;
  Files files;
  std::vector<std::byte> records;  // in any order
  const auto take = [&](const std::byte* record) {
    const std::uint64_t hash = hash_at(record);
    if (hash >= cursor && hash <= last) records.insert(records.end(), record, record + record_bytes_);
  };
  constexpr int kUnknown = 64 - ColdIndex::kKeptBits;
  std::uint64_t next = 0;  // the first prefix that is not read
  bool more = false;
  {
    std::lock_guard lock(mutex_);
    if (of_snap && !snapshot_open_) throw std::invalid_argument("scan: the snapshot was closed");
    std::vector<std::uint32_t> places(files_.size());
    std::size_t count = 0, visited = 0;
    std::uint64_t before = 0;
    // Whole prefixes are read: the rows of one are in no known order.
    const auto visit = [&](std::size_t partition, std::uint64_t entry) {
      const std::uint64_t prefix = ColdIndex::prefix_of(partition, entry);
      if (prefix > last >> kUnknown) return false;
      if ((count >= limit || visited >= kVisited) && prefix != before) {
        next = prefix;
        more = true;
        return false;
      }
      before = prefix;
      ++visited;
      const std::uint64_t location = entry & ColdIndex::kLocationMask;
      const std::shared_ptr<File>& file = files_[location >> kRowBits];
      if (of_snap && !of_snapshot(*file)) return true;
      if (unlinked && file->linked) return true;
      if (since != 0 && file->buffer == nullptr && file->newest_epoch <= since) return true;
      ++count;
      if (const std::byte* const held = in_memory(location)) {
        take(held);
        return true;
      }
      if (places[file->slot] == 0) {
        files.push_back(file);
        places[file->slot] = static_cast<std::uint32_t>(files.size());
      }
      wanted.push_back({location, prefix << kUnknown, 0, places[file->slot] - 1});
      return true;
    };
    for (std::size_t part = ColdIndex::partition_of(cursor); part <= ColdIndex::partition_of(last) && !more;
         ++part) {
      const std::uint64_t tag = part == ColdIndex::partition_of(cursor) ? ColdIndex::tag_of(cursor) : 0;
      auto& captured = captured_[part];
      if (!of_snap || captured.empty()) {
        index_.walk(part, tag, [&](std::uint64_t entry) { return visit(part, entry); });
        continue;
      }
      // Both are ascending, and have no entry in common.
      std::sort(captured.begin(), captured.end());
      auto gone = std::lower_bound(captured.begin(), captured.end(), tag << ColdIndex::kLocationBits);
      bool on = true;
      index_.walk(part, tag, [&](std::uint64_t entry) {
        for (; on && gone != captured.end() && *gone < entry; ++gone) on = visit(part, *gone);
        on = on && visit(part, entry);
        return on;
      });
      for (; on && gone != captured.end(); ++gone) on = visit(part, *gone);
    }
  }
  std::mutex taking;
  fetch(wanted, files, [&](const Wanted& one, const std::byte* record) {
    std::lock_guard lock(taking);
    const std::size_t before = records.size();
    take(record);
    const File& file = *files[one.file];
    if (file.adopted && records.size() > before) put_epoch(records.data() + before, file.newest_epoch);
  });

  const std::size_t rows = records.size() / record_bytes_;
  std::vector<std::pair<std::uint64_t, std::size_t>> order(rows);
  for (std::size_t i = 0; i < rows; ++i) order[i] = {hash_at(records.data() + i * record_bytes_), i};
  std::sort(order.begin(), order.end());
  const std::size_t returned = std::min(rows, limit);
  chunk.records.resize(returned * record_bytes_);
  for (std::size_t i = 0; i < returned; ++i)
    std::memcpy(chunk.records.data() + i * record_bytes_, records.data() + order[i].second * record_bytes_,
                record_bytes_);
  chunk.done = returned == rows && !more;
  if (!chunk.done) chunk.cursor = returned < rows ? order[returned].first : next << kUnknown;
  return chunk;
}

bool ColdStore::next(HeadWalk& walk) {
  std::size_t& first = walk.first_;
  std::size_t rows = 0;
  walk.file_ = nullptr;
  {
    std::unique_lock lock(mutex_);
    // Rows that are on their way from a buffer to a file are met in the file, once all are there.
    done_.wait(lock, [&] {
      bool filling = false;
      for (const std::shared_ptr<File>& file : files_) {
        if (file == nullptr || file->oldest > walk.time_) continue;
        filling |= file->filling;
        if (file->filling || file->live == 0) continue;
        const auto seen = walk.seen_.find(file->number);
        first = seen != walk.seen_.end() ? seen->second : 0;
        rows = file->rows;
        if (first == rows) continue;
        walk.file_ = file;
        return true;
      }
      return !filling;
    });
  }
  if (walk.file_ == nullptr) return false;
  const File& file = *walk.file_;
  if (file.buffer != nullptr) {  // what is in it stays as it is
    walk.heads_.resize(std::min(kHeads, rows - first));
    for (std::size_t i = 0; i < walk.heads_.size(); ++i)
      walk.heads_[i] = head_at(file.buffer.get() + (first + i) * record_bytes_);
  } else {
    if (walk.memory_ == nullptr)
      walk.memory_ = aligned(std::max<std::size_t>(kStreamBytes / block_bytes_, 1) * block_bytes_);
    first = read_heads(file, first, walk.memory_.get(), walk.heads_);
  }
  walk.seen_[file.number] = first + walk.heads_.size();
  return true;
}

void ColdStore::forget(const HeadWalk& walk, std::span<const std::uint32_t> positions,
                       std::vector<std::uint64_t>& gone) {
  const std::uint64_t base = (std::uint64_t{walk.file_->slot} << kRowBits) + walk.first_;
  for (std::size_t at = 0; at < positions.size();) {
    if (at > 0) give_way();
    std::lock_guard lock(mutex_);
    for (const std::size_t end = std::min(positions.size(), at + kLocked); at < end; ++at) {
      // Another file may have its place by now.
      if (files_[walk.file_->slot] != walk.file_) return;
      const std::uint64_t hash = walk.heads_[positions[at]].hash;
      if (at + kAhead < positions.size()) index_.prefetch(walk.heads_[positions[at + kAhead]].hash);
      if (erase(hash, base + positions[at])) gone.push_back(hash);
    }
  }
}

std::size_t ColdStore::alive(const HeadWalk& walk, std::span<const std::uint32_t> positions) const {
  const std::uint64_t base = (std::uint64_t{walk.file_->slot} << kRowBits) + walk.first_;
  std::size_t found = 0;
  for (std::size_t at = 0; at < positions.size();) {
    std::lock_guard lock(mutex_);
    if (files_[walk.file_->slot] != walk.file_) break;
    for (const std::size_t end = std::min(positions.size(), at + kLocked); at < end; ++at)
      found += index_.contains(walk.heads_[positions[at]].hash, base + positions[at]);
  }
  return found;
}

std::size_t ColdStore::read_heads(const File& file, std::size_t row, std::byte* memory,
                                  std::vector<RecordHead>& heads) {
  const std::size_t at_once = std::max<std::size_t>(kStreamBytes / block_bytes_, 1);
  const std::size_t per_block = (block_bytes_ - kBlockHead) / sizeof(RecordHead);
  const std::uint64_t block = row / per_block;
  const std::uint64_t some = std::min<std::uint64_t>(at_once, file.directory_blocks - block);
  const std::uint64_t from = 1 + file.row_blocks + block;
  BlockReader::Read read{file.descriptor, from * block_bytes_, some * block_bytes_, memory};
  reader_->run({&read, 1});
  if (read.error != 0)
    throw ColdDamage(file.path, read.offset,
                     read.error < 0 ? "the file ends too early"
                                    : std::string("it cannot be read: ") + std::strerror(read.error));
  const std::size_t first = block * per_block;
  heads.resize(std::min<std::size_t>(some * per_block, file.rows - first));
  for (std::uint64_t i = 0; i < some; ++i) {
    const std::byte* const bytes = memory + i * block_bytes_;
    check(file, from + i, bytes, {});
    const std::size_t count = std::min(per_block, heads.size() - i * per_block);
    std::memcpy(heads.data() + i * per_block, bytes + kBlockHead, count * sizeof(RecordHead));
  }
  std::lock_guard lock(mutex_);
  counts_.bytes_read += read.bytes;
  ++counts_.reads;
  return first;
}

// ---- the thread that writes and compacts ---------------------------------------------------------

void ColdStore::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto compacts = [&] { return ripe_ > 0 && !snapshot_open_; };
    work_.wait(lock, [&] { return stopping_ || !sealed_.empty() || !dead_.empty() || compacts(); });
    if (stopping_) return;
    busy_ = true;
    if (!sealed_.empty()) {
      write_first(lock);
    } else if (const std::shared_ptr<File> file = compacts() ? worth_compacting() : nullptr) {
      lock.unlock();
      compact(file);
      lock.lock();
    }
    drop_dead(lock);
    busy_ = false;
    done_.notify_all();
  }
}

void ColdStore::write_first(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<File> sealed = sealed_.front();
  lock.unlock();
  write(sealed);
  lock.lock();
  if (!sealed_.empty() && sealed_.front() == sealed) sealed_.pop_front();
  done_.notify_all();
}

void ColdStore::drop_dead(std::unique_lock<std::mutex>& lock) {
  if (dead_.empty()) return;
  std::vector<std::shared_ptr<File>> dead = std::exchange(dead_, {});
  lock.unlock();
  dead.clear();
  lock.lock();
}

// Notes why nothing can be written, and waits before the next attempt; false if the store is closed.
bool ColdStore::pause(std::unique_lock<std::mutex>& lock, const std::string& trouble) {
  trouble_ = trouble;
  drop_dead(lock);  // which may make room
  done_.notify_all();
  work_.wait_for(lock, std::chrono::milliseconds(500), [&] { return stopping_; });
  return !stopping_;
}

// Writes the live rows of a full buffer, in the order of their hashes, and leads the index to them.
void ColdStore::write(const std::shared_ptr<File>& sealed) {
  std::vector<const std::byte*> records;
  const std::uint64_t first = std::uint64_t{sealed->slot} << kRowBits;
  const auto location_of = [&](const std::byte* record) {
    return first + static_cast<std::size_t>(record - sealed->buffer.get()) / record_bytes_;
  };
  records.reserve(sealed->rows);
  for (std::size_t row = 0; row < sealed->rows; ++row)
    records.push_back(sealed->buffer.get() + row * record_bytes_);
  // Before the index is asked, which is in this order, too.
  std::sort(records.begin(), records.end(),
            [](const std::byte* a, const std::byte* b) { return hash_at(a) < hash_at(b); });
  std::size_t kept = 0;
  for (std::size_t at = 0; at < records.size();) {
    std::lock_guard lock(mutex_);
    for (const std::size_t end = std::min(records.size(), at + kLocked); at < end; ++at)
      if (index_.contains(hash_at(records[at]), location_of(records[at]))) records[kept++] = records[at];
  }
  records.resize(kept);
  std::shared_ptr<File> file;
  std::unique_lock lock(mutex_);
  while (!records.empty()) {
    if (files_[sealed->slot] != sealed) return;  // cleared meanwhile
    auto attempt = std::make_shared<File>();
    attempt->number = next_number_++;
    lock.unlock();
    std::string trouble;
    try {
      write_file(*attempt, records);
    } catch (const std::system_error& error) {
      trouble = error.what();
    }
    lock.lock();
    if (trouble.empty()) {
      trouble_.clear();
      file = attempt;
      break;
    }
    attempt.reset();  // removes its file
    if (!pause(lock, trouble)) return;
  }
  lock.unlock();
  std::unique_lock still(moves_);
  lock.lock();
  if (files_[sealed->slot] != sealed) return;
  if (file != nullptr) {
    file->filling = true;
    const std::shared_ptr<File> placed = add_file();  // gives it a slot
    file->slot = placed->slot;
    file->sequence = sealed->sequence;
    files_[file->slot] = file;
    const std::uint64_t to = std::uint64_t{file->slot} << kRowBits;
    // A row is moved as a whole: a reader finds it in the buffer or in the file. All others come in between.
    for (std::size_t row = 0; row < records.size();) {
      for (const std::size_t end = std::min(records.size(), row + kMoved); row < end; ++row) {
        if (row + kAhead < records.size()) index_.prefetch(hash_at(records[row + kAhead]));
        if (index_.move(hash_at(records[row]), location_of(records[row]), to + row)) ++file->live;
      }
      lock.unlock();
      still.unlock();
      give_way();
      still.lock();
      lock.lock();
      if (files_[sealed->slot] != sealed) return;  // cleared, and the file with it
    }
    file->filling = false;
    counts_.rows_written += records.size();
    counts_.bytes_written += (1 + file->row_blocks + file->directory_blocks) * block_bytes_;
    sealed->live = 0;
    if (file->live == 0) {
      release(file);
    } else if (2 * file->live < file->rows) {
      file->ripe = true;
      ++ripe_;
    }
  }
  release(sealed);
}

void ColdStore::write_file(File& file, const std::vector<const std::byte*>& records) const {
  const auto failed = [&](const char* what) {
    throw std::system_error(errno, std::generic_category(), std::string(what) + " " + file.path);
  };
  file.path = spec_.folder + "/" + std::to_string(file.number) + ".cold";
  constexpr int kHow = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  // For this user alone, until a checkpoint that links to it makes it as readable as other files there.
  constexpr mode_t kMode = 0600;
  file.descriptor = ::open(file.path.c_str(), kHow | O_DIRECT, kMode);
  // A filesystem without O_DIRECT, such as an older tmpfs, has its pages in the kernel's cache.
  if (file.descriptor < 0 && errno == EINVAL) {
    ::unlink(file.path.c_str());
    file.descriptor = ::open(file.path.c_str(), kHow, kMode);
  }
  if (file.descriptor < 0) failed("cannot create");
  static std::atomic<std::uint32_t> stamps{std::random_device{}()};
  file.stamp = stamps.fetch_add(0x9e3779b9u);
  file.rows = records.size();
  file.row_blocks = (file.rows + rows_per_block_ - 1) / rows_per_block_;
  const std::size_t per_block = (block_bytes_ - kBlockHead) / sizeof(RecordHead);
  file.directory_blocks = (file.rows + per_block - 1) / per_block;
  for (const std::byte* const record : records) {
    const RecordHead head = head_at(record);
    file.oldest = std::min(file.oldest, head.time);
    file.newest = std::max(file.newest, head.time);
    file.newest_epoch = std::max(file.newest_epoch, head.epoch);
  }
  const std::uint64_t blocks = 1 + file.row_blocks + file.directory_blocks;
  // Says at once that the disk is full, and keeps the file in few extents.
  if (::fallocate(file.descriptor, 0, 0, static_cast<off_t>(blocks * block_bytes_)) != 0 &&
      errno != EOPNOTSUPP && errno != ENOSYS)
    failed("cannot make room for");

  const std::size_t at_once = std::max<std::size_t>(kStreamBytes / block_bytes_, 1);
  const Aligned memory = aligned(at_once * block_bytes_);
  std::size_t filled = 0;
  std::uint64_t written = 0;
  const auto flush = [&] {
    for (std::size_t done = 0; done < filled * block_bytes_;) {
      const ssize_t put = ::pwrite(file.descriptor, memory.get() + done, filled * block_bytes_ - done,
                                   static_cast<off_t>(written * block_bytes_ + done));
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) {
        if (put == 0) errno = EIO;
        failed("cannot write");
      }
      done += static_cast<std::size_t>(put);
    }
    written += filled;
    filled = 0;
  };
  const auto block = [&](auto&& fill) {
    std::byte* const bytes = memory.get() + filled * block_bytes_;
    std::memset(bytes, 0, block_bytes_);
    fill(bytes + kBlockHead);
    BlockHead head{0, file.stamp, written + filled};
    std::memcpy(bytes, &head, sizeof(head));
    head.checksum = crc32c({bytes + sizeof(head.checksum), block_bytes_ - sizeof(head.checksum)});
    std::memcpy(bytes, &head.checksum, sizeof(head.checksum));
    if (++filled == at_once) flush();
  };
  block([&](std::byte* to) {
    FileHead head{};
    std::memcpy(head.magic, kMagic, sizeof(kMagic));
    head.version = kVersion;
    head.record_bytes = static_cast<std::uint32_t>(record_bytes_);
    head.block_bytes = block_bytes_;
    head.rows = file.rows;
    head.row_blocks = file.row_blocks;
    head.directory_blocks = file.directory_blocks;
    head.number = file.number;
    head.oldest = file.oldest;
    head.newest = file.newest;
    const std::size_t most = kPage - kBlockHead - sizeof(head);
    head.name_bytes = static_cast<std::uint32_t>(std::min(spec_.table.size(), most));
    std::memcpy(to, &head, sizeof(head));
    std::memcpy(to + sizeof(head), spec_.table.data(), head.name_bytes);
  });
  const auto pack = [&](std::size_t each_block, std::size_t bytes) {
    for (std::size_t row = 0; row < records.size(); row += each_block)
      block([&](std::byte* to) {
        for (std::size_t i = row; i < std::min(records.size(), row + each_block); ++i, to += bytes)
          std::memcpy(to, records[i], bytes);
      });
  };
  pack(rows_per_block_, record_bytes_);
  pack(per_block, sizeof(RecordHead));
  flush();
}

std::shared_ptr<ColdStore::File> ColdStore::worth_compacting() const {
  std::shared_ptr<File> best;
  for (const auto& file : files_)
    if (file != nullptr && file->ripe && (best == nullptr || file->live < best->live)) best = file;
  return best;
}

// Moves the live rows of a file to the buffer. Full buffers are written in between: training may wait for
// that. Stops where a snapshot is opened, which would have to remember each row that moves.
void ColdStore::compact(const std::shared_ptr<File>& file) {
  const std::size_t at_once = std::max<std::size_t>(kStreamBytes / block_bytes_, 1);
  const Aligned memory = aligned(at_once * block_bytes_);
  const std::uint64_t first = std::uint64_t{file->slot} << kRowBits;
  std::uint64_t moved = 0;
  for (std::uint64_t block = 0; block < file->row_blocks; block += at_once) {
    const std::uint64_t some = std::min<std::uint64_t>(at_once, file->row_blocks - block);
    BlockReader::Read read{file->descriptor, (1 + block) * block_bytes_, some * block_bytes_, memory.get()};
    reader_->run({&read, 1});
    std::string trouble;
    if (read.error != 0) trouble = "cannot read " + file->path;
    try {
      for (std::uint64_t i = 0; i < some && trouble.empty(); ++i)
        check(*file, 1 + block + i, memory.get() + i * block_bytes_, {});
    } catch (const ColdDamage& damage) {
      trouble = damage.path() + ": " + damage.what();
    }
    if (!trouble.empty()) {
      // Its rows stay where they are: a lookup of one says what is wrong.
      std::lock_guard lock(mutex_);
      trouble_ = trouble;
      if (std::exchange(file->ripe, false)) --ripe_;
      return;
    }
    const std::size_t begin = block * rows_per_block_;
    const std::size_t end = std::min<std::size_t>(begin + some * rows_per_block_, file->rows);
    for (std::size_t row = begin; row < end; give_way()) {
      const std::lock_guard still(moves_);
      std::lock_guard lock(mutex_);
      if (snapshot_open_ || stopping_ || files_[file->slot] != file) return;
      if (row == begin) {
        counts_.bytes_read += read.bytes;
        ++counts_.reads;
      }
      for (const std::size_t stop = std::min(end, row + kMoved); row < stop; ++row) {
        std::byte* const record = memory.get() + (row / rows_per_block_ - block) * block_bytes_ + kBlockHead +
                                  row % rows_per_block_ * record_bytes_;
        if (file->adopted) put_epoch(record, file->newest_epoch);
        const std::uint64_t hash = hash_at(record);
        if (!index_.erase(hash, first + row)) continue;
        --file->live;
        put(record);
        ++moved;
      }
    }
    std::unique_lock lock(mutex_);
    while (!sealed_.empty() && !stopping_) write_first(lock);
    drop_dead(lock);
    if (file->live == 0) break;
  }
  std::lock_guard lock(mutex_);
  counts_.rows_compacted += moved;
  ++counts_.compactions;
  if (files_[file->slot] == file) release(file);
}

}  // namespace monolith
