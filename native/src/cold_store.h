// ColdStore: the rows of a table that are not in memory, in files.
//
//   append -> buffer -- full, or a snapshot --> sealed -- a thread sorts and writes it --> cold file
//                 ^                                                                          |
//                 +---- its live rows, once half of its rows are dead (compaction) ----------+
//
// A cold file is written once, from front to end, and never changed. Its rows are in the order of their
// hashes. So a walk over all rows in that order reads each block of each file about once, whatever the number
// of files, although the walk is cut into calls that keep no state.
//
//   head       one block: magic, version, sizes, table, number of the file
//   rows       blocks of whole records; a record is hash, event time, epoch (16 bytes), and the row as the
//              table stores it
//   directory  blocks of the first 16 bytes of each record, in the same order: what expiry reads
//
// A block is 4 KiB, or more for rows that are longer. It begins with its checksum (CRC-32C), then the stamp
// of the file and its own number, which the checksum covers: a torn block, a flipped bit and a block of
// another place are all refused.
//
// Files are opened with O_DIRECT where there is such a thing, so the kernel caches none of them: what memory
// this needs is what `stats` says. Only the index knows which rows are alive, and it is in memory: the files
// of a process that died are worth nothing, unless a checkpoint has its own links to them.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "block_reader.h"
#include "cold_index.h"
#include "recent_rows.h"
#include "row_record.h"

namespace monolith {

struct ColdSpec {
  std::string folder;            // exists, and is of this store alone
  std::string table;             // its name, for the head of files and for errors
  std::size_t row_bytes = 0;     // of a row as the table stores it, a multiple of 8
  std::size_t buffer_bytes = 0;  // how many bytes of records are written as one file
  std::size_t recent_bytes =
      0;  // for rows that were read and may be wanted again at once; see remember_up_to
};

// How rows are laid out in files.
struct ColdLayout {
  explicit ColdLayout(std::size_t row_bytes);

  std::size_t record_bytes;
  std::size_t block_bytes;
  std::size_t rows_per_block;
  std::size_t heads_per_block;  // of the directory
};

struct ColdStats {
  std::uint64_t rows = 0, files = 0;
  std::uint64_t bytes_index = 0, bytes_buffers = 0, bytes_recent = 0;  // memory
  std::uint64_t bytes_files = 0, bytes_live = 0;                       // on disk
  std::uint64_t rows_found = 0;                                        // by reads; of these
  std::uint64_t rows_recent = 0;  //   from memory: a buffer, or rows that were read lately
  std::uint64_t reads = 0, bytes_read = 0;
  std::uint64_t rows_written = 0, bytes_written = 0;
  std::uint64_t compactions = 0, rows_compacted = 0;
};

// A block of a cold file that was changed since, or cannot be read.
class ColdDamage : public std::runtime_error {
 public:
  ColdDamage(std::string path, std::uint64_t offset, const std::string& reason)
      : std::runtime_error(reason), path_(std::move(path)), offset_(offset) {}
  const std::string& path() const { return path_; }
  std::uint64_t offset() const { return offset_; }

 private:
  std::string path_;
  std::uint64_t offset_;
};

// A file with rows of the open snapshot, for a checkpoint to link to.
struct ColdLink {
  std::string path;
  std::uint64_t rows = 0;           // in the file
  std::uint64_t alive_rows = 0;     // in the snapshot
  std::vector<std::uint8_t> alive;  // a bit for each row of the file, the lowest of a byte first
};

// Of blocks of a cold file that follow each other, the first of which has this number: the index of the first
// that is not as it was written, -1 if all are. What reads files that a checkpoint links to asks this.
std::int64_t first_bad_block(std::span<const std::byte> blocks, std::size_t block_bytes, std::uint32_t stamp,
                             std::uint64_t number);

struct ColdChunk {
  std::vector<std::byte> records;  // in the order of their hashes
  bool done = false;
  std::uint64_t cursor = 0;  // the hash to continue from, unless done
};

// Thread-safe: any thread reads; calls that change which rows there are (append, forget, clear) come from one
// thread at a time.
class ColdStore {
 public:
  ColdStore(ColdSpec spec, std::shared_ptr<BlockReader> reader);
  // Removes the files.
  ~ColdStore();
  ColdStore(const ColdStore&) = delete;

  std::size_t record_bytes() const { return record_bytes_; }
  std::size_t buffer_bytes() const { return rows_per_file_ * record_bytes_; }
  std::size_t size() const;
  ColdStats stats() const;

  // Takes rows of ids that have none here: records side by side. Does not wait for the disk. With
  // wait_for_room before each half of a buffer, there are no more than two buffers, and a third while files
  // are compacted.
  void append(std::span<const std::byte> records);
  // Waits until half a buffer can be taken in two buffers; false if that takes longer.
  bool wait_for_room(double seconds);
  // Why the last attempt to write failed; empty if it did not.
  std::string trouble() const;
  // Writes what is buffered, and waits until it is written and nothing is left to compact. For tests.
  void flush();

  // While it lives no row changes its location.
  class Still {
   public:
    explicit Still(ColdStore& store) : lock_(store.moves_) {}

   private:
    std::unique_lock<std::mutex> lock_;
  };

  // Copies the records of some hashes, in the order given; `locations` says where each is, 0 if it has none.
  // With `remember`, rows from files are kept for a while, since they are likely to be wanted again.
  void read(std::span<const std::uint64_t> hashes, std::byte* records, std::uint64_t* locations,
            bool remember);
  // The memory for such rows, from now on; and how many were kept since the last call.
  void remember_up_to(std::size_t bytes);
  std::size_t count_remembered() { return remembered_.exchange(0); }
  // Removes rows, if they are still at their locations; returns how many were, and appends their hashes to
  // `gone`.
  std::size_t forget(std::span<const std::uint64_t> hashes, const std::uint64_t* locations,
                     std::vector<std::uint64_t>* gone = nullptr);
  // Up to `limit` rows with hashes from `cursor` to `last`; those of the snapshot, if wanted, or of it those
  // in no file of links(). Files without a record of an epoch beyond `since` are left out.
  ColdChunk scan(std::uint64_t cursor, std::uint64_t last, std::size_t limit, bool of_snapshot,
                 bool unlinked = false, std::uint32_t since = 0);
  // A walk over the heads of all rows, dead ones included, of files with rows that are not newer than `time`,
  // a part of a file at a time. Rows may come, go and move meanwhile: one that was there when the walk began
  // is met where it was or where it moved to.
  class HeadWalk;
  // Moves to the next part; false at the end. Waits for no lock for long, but for the disk.
  bool next(HeadWalk& walk);
  // Removes rows of the part that the walk is at, by their positions in it, if they are still there; appends
  // their hashes to `gone`.
  void forget(const HeadWalk& walk, std::span<const std::uint32_t> positions,
              std::vector<std::uint64_t>& gone);
  // How many of them are still there.
  std::size_t alive(const HeadWalk& walk, std::span<const std::uint32_t> positions) const;
  void clear();

  // Snapshots, one at a time: the rows of this moment stay readable until it is closed, at 8 bytes for each
  // that is removed meanwhile.
  void open_snapshot();
  void close_snapshot();
  // Files of which at least half of the rows are in the open snapshot, without those of which fewer are: a
  // link keeps a whole file on disk. Reads no row. Later calls until the snapshot is closed return the same:
  // rows that were in a buffer at the first one stay with those that are scanned.
  std::vector<ColdLink> links();
  // Takes over a file of another store, which is in this folder: its rows with a bit in `alive`, none of
  // which has a row here. They count as changed in `epoch`. Reads only the directory, and calls each(heads of
  // alive rows). Throws ColdDamage for a file that makes no sense or is of other rows.
  std::size_t adopt(const std::string& path, std::span<const std::uint8_t> alive, std::uint32_t epoch,
                    const std::function<void(std::span<const RecordHead>)>& each);

  std::string folder() const { return spec_.folder; }

 private:
  struct File;
  struct Wanted {
    std::uint64_t location;
    std::uint64_t hash;
    std::uint32_t position;  // among what the caller asked for
    std::uint32_t file;      // among the files it holds on to
  };
  using Files = std::vector<std::shared_ptr<File>>;

  static constexpr int kRowBits = 20;
  static constexpr std::uint64_t kRowMask = (1 << kRowBits) - 1;

  const std::byte* in_memory(std::uint64_t location) const;
  void seal();
  std::shared_ptr<File> add_file();
  void release(const std::shared_ptr<File>& file);
  bool erase(std::uint64_t hash, std::uint64_t location);
  void put(const std::byte* record);
  // Reads the blocks of rows, each once, and calls each(wanted, record), from several threads at once.
  template <class Each>
  void fetch(std::vector<Wanted>& wanted, const Files& files, Each&& each);
  void check(const File& file, std::uint64_t block, const std::byte* bytes,
             std::span<const Wanted> wanted) const;
  // Reads the heads of rows of a file from `row` on, some at a time, and returns the number of the first:
  // that of its block of the directory.
  std::size_t read_heads(const File& file, std::size_t row, std::byte* memory,
                         std::vector<RecordHead>& heads);
  std::uint64_t key_of(const File& file, std::uint64_t location) const;
  bool of_snapshot(const File& file) const;

  void serve();
  // With mutex_ held, which they release for a while.
  void write_first(std::unique_lock<std::mutex>& lock);
  void drop_dead(std::unique_lock<std::mutex>& lock);
  void write(const std::shared_ptr<File>& sealed);
  void write_file(File& file, const std::vector<const std::byte*>& records) const;
  std::shared_ptr<File> worth_compacting() const;
  void compact(const std::shared_ptr<File>& file);
  bool pause(std::unique_lock<std::mutex>& lock, const std::string& trouble);

  const ColdSpec spec_;
  const std::shared_ptr<BlockReader> reader_;
  const std::size_t record_bytes_;
  const std::size_t block_bytes_;
  const std::size_t rows_per_block_;
  const std::size_t rows_per_file_;

  // Order of locks: moves_, then mutex_.
  std::mutex moves_;  // held while rows change their location, and by a Still

  mutable std::mutex mutex_;  // guards all below
  ColdIndex index_;
  std::vector<std::shared_ptr<File>> files_;  // by the high bits of a location; 0 is none
  std::vector<std::uint32_t> free_slots_;
  std::shared_ptr<File> open_;  // takes what is appended
  std::deque<std::shared_ptr<File>> sealed_;
  std::vector<std::shared_ptr<File>> dead_;  // removed by the thread, since no lock is to wait for that
  std::uint64_t next_number_ = 1;
  ColdStats counts_;
  std::string trouble_;
  std::size_t ripe_ = 0;  // files worth compacting
  bool stopping_ = false, busy_ = false;
  std::condition_variable work_, done_;

  bool snapshot_open_ = false;
  bool links_chosen_ = false;
  std::uint64_t mark_ = 0;                            // files with a smaller number are part of the snapshot
  std::vector<std::vector<std::uint64_t>> captured_;  // by partition: entries of it that are gone since
  std::vector<std::shared_ptr<File>> kept_;           // released, but for the snapshot

  mutable std::mutex recent_mutex_;  // guards recent_; taken last
  RecentRows recent_;                // by number of the file and of the row
  std::atomic<std::size_t> remembered_{0};

  std::thread thread_;
};

class ColdStore::HeadWalk {
 public:
  explicit HeadWalk(std::uint32_t time) : time_(time) {}
  std::span<const RecordHead> heads() const { return heads_; }

 private:
  friend class ColdStore;
  std::uint32_t time_;
  std::unordered_map<std::uint64_t, std::size_t> seen_;  // by number of the file: how many of its rows
  std::shared_ptr<File> file_;
  std::size_t first_ = 0;  // the number in the file of the first of heads_
  std::vector<RecordHead> heads_;
  Aligned memory_;
};

}  // namespace monolith
