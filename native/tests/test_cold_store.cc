// Rows in files: found again whatever is written, compacted, torn or removed meanwhile.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cold_store.h"
#include "hash.h"

namespace {

using namespace monolith;
namespace fs = std::filesystem;

constexpr std::size_t kRow = 32;

// A folder of its own, gone at the end.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "monolith-cold-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::vector<std::string> files() const {
    std::vector<std::string> found;
    for (const auto& one : fs::directory_iterator(path_)) found.push_back(one.path().string());
    return found;
  }

 private:
  std::string path_;
};

ColdSpec spec(const Folder& folder, std::size_t buffer = 64 << 10, std::size_t row = kRow) {
  return {folder.path(), "item", row, buffer, 0};
}

// The record of an ID; its bytes say which ID and which version it is of.
std::vector<std::byte> record(std::int64_t id, std::uint32_t version, std::size_t row = kRow) {
  std::vector<std::byte> bytes(sizeof(RecordHead) + row);
  const RecordHead head{mix(static_cast<std::uint64_t>(id)), version, 0};
  std::memcpy(bytes.data(), &head, sizeof(head));
  for (std::size_t i = sizeof(head); i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(static_cast<std::uint64_t>(id) * 31 + version * 7 + i);
  return bytes;
}

void put(ColdStore& store, const std::vector<std::int64_t>& ids, std::uint32_t version,
         std::size_t row = kRow) {
  std::vector<std::byte> all;
  for (const std::int64_t id : ids) {
    const auto one = record(id, version, row);
    all.insert(all.end(), one.begin(), one.end());
  }
  while (!store.wait_for_room(1)) {
  }
  store.append(all);
}

struct Answer {
  std::vector<std::byte> records;
  std::vector<std::uint64_t> hashes, locations;
};

Answer get(ColdStore& store, const std::vector<std::int64_t>& ids) {
  Answer answer;
  for (const std::int64_t id : ids) answer.hashes.push_back(mix(static_cast<std::uint64_t>(id)));
  answer.records.resize(ids.size() * store.record_bytes());
  answer.locations.resize(ids.size());
  store.read(answer.hashes, answer.records.data(), answer.locations.data(), false);
  return answer;
}

std::vector<std::int64_t> range(std::int64_t first, std::int64_t end) {
  std::vector<std::int64_t> ids;
  for (; first < end; ++first) ids.push_back(first);
  return ids;
}

bool is(const Answer& answer, std::size_t i, const std::vector<std::byte>& expected) {
  return answer.locations[i] != 0 &&
         std::memcmp(answer.records.data() + i * expected.size(), expected.data(), expected.size()) == 0;
}

void rows_are_found_in_the_buffer_and_in_files() {
  for (const std::size_t row : {std::size_t{16}, kRow, std::size_t{400}, std::size_t{6000}}) {
    const Folder folder;
    ColdStore store(spec(folder, 64 << 10, row), std::make_shared<BlockReader>(4));
    const auto ids = range(-50, 950);
    put(store, ids, 1, row);
    for (int again = 0; again < 2; ++again) {
      const Answer answer = get(store, ids);
      bool all = true;
      for (std::size_t i = 0; i < ids.size(); ++i) all &= is(answer, i, record(ids[i], 1, row));
      CHECK(all);
      CHECK(get(store, {5000}).locations[0] == 0);
      store.flush();
    }
    CHECK_EQUAL(store.stats().bytes_buffers, 0u);
    CHECK(store.stats().files > 0);
  }
}

void a_walk_is_in_the_order_of_hashes_and_meets_each_row_once() {
  const Folder folder;
  ColdStore store(spec(folder), std::make_shared<BlockReader>(4));
  put(store, range(0, 20'000), 1);
  store.flush();
  put(store, range(20'000, 20'500), 1);
  for (const std::size_t limit : {1000u, 7919u, 100'000u}) {
    std::size_t count = 0;
    std::uint64_t before = 0;
    bool ordered = true;
    for (std::uint64_t cursor = 0;;) {
      const ColdChunk chunk = store.scan(cursor, ~std::uint64_t{0}, limit, false);
      CHECK(chunk.records.size() <= limit * store.record_bytes());
      for (std::size_t at = 0; at < chunk.records.size(); at += store.record_bytes()) {
        const std::uint64_t hash = hash_at(chunk.records.data() + at);
        ordered &= count == 0 || hash > before;
        before = hash;
        ++count;
      }
      if (chunk.done) break;
      cursor = chunk.cursor;
    }
    CHECK_EQUAL(count, 20'500u);
    CHECK(ordered);
  }
}

void rows_come_and_go_as_in_a_map() {
  const Folder folder;
  ColdStore store(spec(folder, 16 << 10), std::make_shared<BlockReader>(4));
  std::map<std::int64_t, std::uint32_t> truth;
  std::mt19937_64 random(1);
  for (std::uint32_t step = 1; step < 300; ++step) {
    std::vector<std::int64_t> batch;
    for (int i = 0; i < 100; ++i) batch.push_back(static_cast<std::int64_t>(random() % 5000));
    std::sort(batch.begin(), batch.end());
    batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
    {
      const ColdStore::Still still(store);
      const Answer answer = get(store, batch);
      bool right = true;
      std::size_t there = 0;
      for (std::size_t i = 0; i < batch.size(); ++i) {
        const auto known = truth.find(batch[i]);
        there += known != truth.end();
        right &=
            known == truth.end() ? answer.locations[i] == 0 : is(answer, i, record(batch[i], known->second));
      }
      CHECK(right);
      CHECK_EQUAL(store.forget(answer.hashes, answer.locations.data()), there);
    }
    for (const std::int64_t id : batch) truth.erase(id);
    if (step % 5 != 0) {
      put(store, batch, step);
      for (const std::int64_t id : batch) truth[id] = step;
    }
    if (step % 50 == 0) store.flush();
    CHECK_EQUAL(store.size(), truth.size());
  }
  store.flush();
  CHECK(store.stats().compactions > 0);
  // Files whose rows are mostly dead are gone: what is left is at most twice as large, and heads and ends.
  const ColdStats stats = store.stats();
  CHECK(stats.bytes_files < 3 * stats.rows * store.record_bytes() + 8 * 4096 * stats.files);
  CHECK_EQUAL(folder.files().size(), stats.files);
}

void readers_find_every_row_while_files_are_compacted() {
  const Folder folder;
  ColdStore store(spec(folder, 16 << 10), std::make_shared<BlockReader>(4));
  const auto kept = range(0, 500);
  put(store, kept, 9);
  std::atomic<bool> stop{false};
  std::atomic<int> lost{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t)
    readers.emplace_back([&] {
      while (!stop) {
        const Answer answer = get(store, kept);
        for (std::size_t i = 0; i < kept.size(); ++i)
          if (!is(answer, i, record(kept[i], 9))) ++lost;
      }
    });
  // Rows between them come and go, so that the files of those that stay are compacted again and again.
  for (std::uint32_t round = 0; round < 40; ++round) {
    const auto passing = range(10'000, 12'000);
    put(store, passing, round);
    const ColdStore::Still still(store);
    const Answer answer = get(store, passing);
    store.forget(answer.hashes, answer.locations.data());
  }
  store.flush();
  stop = true;
  for (std::thread& reader : readers) reader.join();
  CHECK_EQUAL(lost.load(), 0);
  CHECK_EQUAL(store.size(), kept.size());
}

// Each read waits for all others, of both calls.
void calls_read_side_by_side() {
  const Folder folder;
  const std::string path = folder.path() + "/blocks";
  std::ofstream(path) << std::string(4096, 'x');
  const int file = ::open(path.c_str(), O_RDONLY);
  BlockReader reader(8);
  constexpr std::size_t kEach = 4;
  std::mutex mutex;
  std::condition_variable met;
  std::size_t there = 0;
  std::atomic<std::size_t> alone{0};
  std::vector<std::thread> callers;
  for (int call = 0; call < 2; ++call)
    callers.emplace_back([&] {
      std::vector<BlockReader::Read> reads(kEach, {file, 0, 4096, nullptr});
      reader.run(reads, [&](std::size_t, const std::byte*) {
        std::unique_lock lock(mutex);
        ++there;
        met.notify_all();
        alone += !met.wait_for(lock, std::chrono::seconds(10), [&] { return there == 2 * kEach; });
      });
    });
  for (std::thread& caller : callers) caller.join();
  ::close(file);
  CHECK_EQUAL(alone, 0u);
}

void a_snapshot_keeps_the_rows_of_its_moment() {
  const Folder folder;
  ColdStore store(spec(folder, 16 << 10), std::make_shared<BlockReader>(4));
  put(store, range(0, 3000), 1);
  store.open_snapshot();
  const auto gone = range(0, 2000);
  {
    const ColdStore::Still still(store);
    const Answer answer = get(store, gone);
    CHECK_EQUAL(store.forget(answer.hashes, answer.locations.data()), gone.size());
  }
  put(store, range(1000, 1500), 2);
  put(store, range(5000, 9000), 2);
  for (int again = 0; again < 2; ++again) {
    std::map<std::int64_t, std::uint32_t> seen;
    for (std::uint64_t cursor = 0;;) {
      const ColdChunk chunk = store.scan(cursor, ~std::uint64_t{0}, 700, true);
      for (std::size_t at = 0; at < chunk.records.size(); at += store.record_bytes()) {
        const RecordHead head = head_at(chunk.records.data() + at);
        CHECK(seen.emplace(unmix(head.hash), head.time).second);
      }
      if (chunk.done) break;
      cursor = chunk.cursor;
    }
    CHECK_EQUAL(seen.size(), 3000u);
    bool old = true;
    for (const auto& [id, version] : seen) old &= id < 3000 && version == 1;
    CHECK(old);
    while (!store.wait_for_room(1)) {
    }
  }
  store.close_snapshot();
  store.flush();
  CHECK_EQUAL(store.size(), 5500u);
  CHECK_THROWS(std::invalid_argument, "closed", store.scan(0, 1, 1, true));
}

// The rows of a scan, as ID and version; each is there once.
std::map<std::int64_t, std::uint32_t> scanned(ColdStore& store, bool of_snapshot, bool unlinked = false,
                                              std::uint32_t since = 0) {
  std::map<std::int64_t, std::uint32_t> seen;
  for (std::uint64_t cursor = 0;;) {
    const ColdChunk chunk = store.scan(cursor, ~std::uint64_t{0}, 700, of_snapshot, unlinked, since);
    for (std::size_t at = 0; at < chunk.records.size(); at += store.record_bytes()) {
      const RecordHead head = head_at(chunk.records.data() + at);
      CHECK(seen.emplace(unmix(head.hash), head.time).second);
    }
    if (chunk.done) return seen;
    cursor = chunk.cursor;
  }
}

void forget(ColdStore& store, const std::vector<std::int64_t>& ids) {
  const ColdStore::Still still(store);
  const Answer answer = get(store, ids);
  store.forget(answer.hashes, answer.locations.data());
}

// A store in another folder that has taken over the links, and says how many rows that were.
std::size_t adopt(ColdStore& other, const std::vector<ColdLink>& links, std::uint32_t epoch = 0) {
  std::size_t rows = 0, number = 0;
  for (const ColdLink& link : links) {
    const std::string own = other.folder() + "/" + std::to_string(number++) + ".adopted";
    fs::create_hard_link(link.path, own);
    std::size_t seen = 0;
    const std::size_t taken =
        other.adopt(own, link.alive, epoch, [&](std::span<const RecordHead> heads) { seen += heads.size(); });
    CHECK_EQUAL(taken, link.alive_rows);
    CHECK_EQUAL(seen, taken);
    rows += taken;
  }
  return rows;
}

// Whatever is on its way to a file, is forgotten or is appended meanwhile: a row of the snapshot is in one
// link, or in the scan of all others.
void rows_that_move_during_a_walk_over_heads_are_met() {
  const Folder folder;
  ColdStore store(spec(folder), std::make_shared<BlockReader>(4));
  for (std::int64_t first = 0; first < 9000; first += 500)  // in all files there are old rows
    put(store, range(first, first + 500), first % 1500 == 0 ? 1 : 2);
  ColdStore::HeadWalk walk(1);
  std::vector<std::uint64_t> gone;
  std::int64_t newer = 500;
  for (int part = 0; store.next(walk); ++part) {
    std::vector<std::uint32_t> old;
    for (std::size_t i = 0; i < walk.heads().size(); ++i)
      if (walk.heads()[i].time <= 1) old.push_back(static_cast<std::uint32_t>(i));
    // Meanwhile buffers are written, and files are compacted since most of their rows are gone.
    if (part < 8) {
      forget(store, range(newer, newer + 1000));
      newer += 1500;
      if (part % 2 == 0) put(store, range(20'000 + part * 100, 20'100 + part * 100), 2);
      store.flush();
    }
    store.forget(walk, old, gone);
  }
  CHECK(store.stats().compactions > 0);
  CHECK_EQUAL(gone.size(), 3000u);
  bool met = true;
  for (std::int64_t first = 0; first < 9000; first += 1500)
    for (const std::uint64_t location : get(store, range(first, first + 500)).locations) met &= location == 0;
  CHECK(met);
}

void links_and_all_other_rows_are_the_snapshot() {
  for (int round = 0; round < 12; ++round) {
    const Folder folder, elsewhere;
    ColdStore store(spec(folder, 32 << 10), std::make_shared<BlockReader>(4));
    put(store, range(0, 6000), 1);
    if (round % 3 == 0) store.flush();
    forget(store, range(0, 300 * round));  // leaves files with fewer than half of their rows
    store.open_snapshot();
    forget(store, range(3000, 4000));
    const std::vector<ColdLink> links = store.links();
    put(store, range(3000, 3500), 2);
    put(store, range(7000, 9000), 2);
    forget(store, range(4000, 4500));
    store.flush();
    for (int again = 0; again < 2; ++again) {
      const std::vector<ColdLink> same = store.links();
      CHECK_EQUAL(same.size(), links.size());
      for (std::size_t i = 0; i < same.size(); ++i) {
        CHECK_EQUAL(same[i].path, links[i].path);
        CHECK(same[i].alive == links[i].alive);
        CHECK(2 * links[i].alive_rows >= links[i].rows);
      }
    }
    if (round % 3 == 0) CHECK(links.size() > 2);
    auto seen = scanned(store, true, true);
    ColdStore other(spec(elsewhere, 64 << 10), std::make_shared<BlockReader>(4));
    const std::size_t rows = adopt(other, links);
    for (const auto& [id, version] : scanned(other, false)) CHECK(seen.emplace(id, version).second);
    const auto expected = scanned(store, true);
    CHECK_EQUAL(expected.size(), static_cast<std::size_t>(6000 - 300 * round));
    CHECK(seen == expected);
    CHECK_EQUAL(other.size(), rows);
    store.close_snapshot();
    CHECK_THROWS(std::invalid_argument, "closed", store.links());
  }
}

// The rows of adopted files are found, compacted and removed as any, and outlive the store that wrote them.
void adopted_rows_are_as_good_as_appended_ones() {
  const Folder folder, elsewhere;
  ColdStore other(spec(elsewhere, 32 << 10), std::make_shared<BlockReader>(4));
  {
    ColdStore store(spec(folder, 32 << 10), std::make_shared<BlockReader>(4));
    put(store, range(0, 5000), 1);
    store.flush();
    store.open_snapshot();
    forget(store, range(0, 100));
    const std::size_t rows = adopt(other, store.links(), 7);
    CHECK_EQUAL(rows, scanned(store, true).size() - scanned(store, true, true).size());
  }
  CHECK(folder.files().empty());
  const std::size_t adopted = other.size();
  CHECK(adopted > 4000);
  std::vector<std::int64_t> ids;
  for (const auto& [id, version] : scanned(other, false)) ids.push_back(id);
  const auto epoch_is_theirs = [&] {
    const Answer answer = get(other, ids);
    std::size_t found = 0;
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (answer.locations[i] != 0) {
        const RecordHead head = head_at(answer.records.data() + i * other.record_bytes());
        CHECK(head.epoch == 7 && head.time == 1);
        ++found;
      }
    CHECK_EQUAL(found, other.size());
  };
  epoch_is_theirs();
  CHECK_EQUAL(scanned(other, false, false, 6).size(), adopted);
  CHECK_EQUAL(scanned(other, false, false, 7).size(), 0u);
  // Most of each file goes: the others move, with the epoch of their file.
  std::vector<std::int64_t> most;
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (i % 5 != 0) most.push_back(ids[i]);
  forget(other, most);
  other.flush();
  CHECK(other.stats().compactions > 2);
  CHECK_EQUAL(scanned(other, false, false, 6).size(), adopted - most.size());
  epoch_is_theirs();
  CHECK_EQUAL(elsewhere.files().size(), other.stats().files);
}

// Neither is a file that was cut, changed or is of other rows, nor one with too few bits.
void what_cannot_be_adopted_is_refused() {
  const Folder folder, elsewhere;
  ColdStore store(spec(folder), std::make_shared<BlockReader>(4));
  put(store, range(0, 1000), 1);
  store.flush();
  store.open_snapshot();
  const ColdLink link = store.links().at(0);
  const auto refused = [&](const char* why, const std::function<void(const std::string&)>& change,
                           std::size_t row = kRow, std::size_t bits = 125) {
    ColdStore other(spec(elsewhere, 64 << 10, row), std::make_shared<BlockReader>(4));
    const std::string own = elsewhere.path() + "/own";
    fs::copy_file(link.path, own, fs::copy_options::overwrite_existing);
    change(own);
    const std::vector<std::uint8_t> alive(bits, 0xff);
    CHECK_THROWS(ColdDamage, why, other.adopt(own, alive, 0, [](auto) {}));
  };
  const auto flip = [](std::int64_t at) {
    return [at](const std::string& path) {
      std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
      file.seekp(at < 0 ? static_cast<std::int64_t>(fs::file_size(path)) + at : at);
      file.put('!');
    };
  };
  refused("first block", flip(40));
  refused("checksum", flip(-4000));
  refused("ends too early",
          [](const std::string& path) { fs::resize_file(path, fs::file_size(path) - 4096); });
  refused("first block", [](const std::string& path) { fs::resize_file(path, 100); });
  refused("another size", [](const std::string&) {}, 48);
  refused("another number", [](const std::string&) {}, kRow, 124);
  refused("cannot be opened", [](const std::string& path) { fs::remove(path); });
}

// Every way in which a file may be other than it was written is an error that names file and offset.
void a_damaged_block_is_refused_by_name() {
  const Folder folder;
  ColdStore store(spec(folder, 32 << 10), std::make_shared<BlockReader>(4));
  const auto ids = range(0, 600);
  put(store, ids, 1);
  store.flush();
  CHECK_EQUAL(folder.files().size(), 1u);
  const std::string path = folder.files()[0];
  const auto size = fs::file_size(path);
  std::string whole(size, '\0');
  std::ifstream(path, std::ios::binary).read(whole.data(), static_cast<std::streamsize>(size));
  const auto overwrite = [&](const std::string& content) {
    const int file = ::open(path.c_str(), O_WRONLY | O_TRUNC);
    CHECK_EQUAL(::write(file, content.data(), content.size()), static_cast<ssize_t>(content.size()));
    ::close(file);
  };
  const auto damage = [&](std::uint64_t least) {
    try {
      get(store, ids);
    } catch (const ColdDamage& found) {
      CHECK_EQUAL(found.path(), path);
      CHECK(found.offset() >= least && found.offset() % 4096 == 0);
      return true;
    }
    return false;
  };
  CHECK(!damage(0));
  std::mt19937_64 random(2);
  const std::uint64_t rows_end = 4096 * (1 + (600 * store.record_bytes() + 4095) / 4080);
  for (int i = 0; i < 30; ++i) {  // a flipped bit
    const std::uint64_t at = 4096 + random() % (rows_end - 8192);
    std::string torn = whole;
    torn[at] = static_cast<char>(torn[at] ^ 1 << random() % 8);
    overwrite(torn);
    CHECK(damage(at / 4096 * 4096));
  }
  for (int i = 0; i < 10; ++i) {  // cut off anywhere
    overwrite(whole.substr(0, random() % (rows_end - 8192)));
    CHECK(damage(0));
  }
  std::string swapped = whole;  // a block of another place, whole by itself
  std::swap_ranges(swapped.begin() + 4096, swapped.begin() + 8192, swapped.begin() + 8192);
  overwrite(swapped);
  CHECK(damage(4096));
  overwrite(whole);
  CHECK(!damage(0));
}

void files_go_with_their_store() {
  const Folder folder;
  {
    ColdStore store(spec(folder), std::make_shared<BlockReader>(4));
    put(store, range(0, 10'000), 1);
    store.flush();
    CHECK(!folder.files().empty());
  }
  CHECK(folder.files().empty());
}

void while_nothing_can_be_written_no_row_is_lost() {
  const Folder folder;
  ColdStore store(spec(folder, 16 << 10), std::make_shared<BlockReader>(4));
  const std::string moved = folder.path() + "-moved";
  fs::rename(folder.path(), moved);  // as good as a full disk: files cannot be made
  const auto ids = range(0, 2000);
  std::vector<std::byte> all;
  for (const std::int64_t id : ids) {
    const auto one = record(id, 1);
    all.insert(all.end(), one.begin(), one.end());
  }
  store.append(all);
  CHECK(!store.wait_for_room(0.1));
  while (store.trouble().empty()) std::this_thread::yield();
  CHECK(store.trouble().find("cannot create") != std::string::npos);
  const Answer before = get(store, ids);
  CHECK(is(before, 1999, record(1999, 1)));
  fs::rename(moved, folder.path());
  store.flush();
  CHECK_EQUAL(store.trouble(), "");
  const Answer after = get(store, ids);
  bool all_there = true;
  for (std::size_t i = 0; i < ids.size(); ++i) all_there &= is(after, i, record(ids[i], 1));
  CHECK(all_there);
}

void the_index_finds_what_was_put_into_it() {
  ColdIndex index;
  std::mt19937_64 random(3);
  std::map<std::uint64_t, std::uint64_t> truth;  // location to hash
  std::uint64_t next = 1;
  for (int i = 0; i < 400'000; ++i) {
    if (truth.empty() || random() % 3 != 0) {
      // Few partitions, and few tags: many entries share one.
      const std::uint64_t hash = (random() % 3 << 62) | (random() % 5000 << 28);
      index.insert(hash, next);
      truth[next++] = hash;
    } else if (random() % 3 == 0) {
      const auto some = truth.lower_bound(random() % next);
      if (some == truth.end()) continue;
      CHECK(index.move(some->second, some->first, next));
      CHECK(!index.move(some->second, some->first, next + 1));
      truth[next++] = some->second;
      truth.erase(some);
    } else {
      auto some = truth.lower_bound(random() % next);
      if (some == truth.end()) some = truth.begin();
      CHECK(index.erase(some->second, some->first));
      CHECK(!index.erase(some->second, some->first));
      truth.erase(some);
    }
  }
  CHECK_EQUAL(index.size(), truth.size());
  bool all = true;
  for (const auto& [location, hash] : truth) all &= index.contains(hash, location);
  CHECK(all);
  std::size_t walked = 0;
  bool ascending = true;
  for (std::size_t part = 0; part < 1u << ColdIndex::kPartitionBits; ++part) {
    std::uint64_t before = 0;
    index.walk(part, 0, [&](std::uint64_t entry) {
      ascending &= entry > before;
      before = entry;
      ++walked;
      return true;
    });
  }
  CHECK_EQUAL(walked, truth.size());
  CHECK(ascending);
}

// From 100,000 rows on, at every moment while it grows, and while rows leave and come.
void the_index_takes_less_than_ten_bytes_for_each_row() {
  ColdIndex index;
  const auto bytes = [&] { return static_cast<double>(index.bytes()) / static_cast<double>(index.size()); };
  const auto hash_of = [](std::uint64_t id) { return mix(static_cast<std::int64_t>(id)); };
  double most = 0;
  std::uint64_t next = 0;
  const auto grow = [&](std::uint64_t rows) {
    while (next < rows) {
      ++next;
      index.insert(hash_of(next), next);
      if (next >= 100'000 && next % 1000 == 0) most = std::max(most, bytes());
    }
  };
  for (const std::uint64_t rows : {100'000u, 1'000'000u, 10'000'000u}) {
    grow(rows);
    most = std::max(most, bytes());
    std::printf("    %9zu rows: %.2f bytes each, %.2f at most\n", index.size(), bytes(), most);
    CHECK(most < 10);
  }
  bool all = true;
  for (std::uint64_t id = 1; id <= next; id += 3) all &= index.move(hash_of(id), id, id + 20'000'000);
  CHECK(all);
  CHECK(bytes() < 10);
  for (std::uint64_t id = 2; id <= next; id += 3) all &= index.erase(hash_of(id), id);
  for (std::uint64_t id = 3; id <= next; id += 6) all &= index.erase(hash_of(id), id);
  CHECK(all);
  CHECK(bytes() < 12);  // half of them are left
}

}  // namespace

int main() {
  return monolith::check::run({
      {"the index finds what was put into it", the_index_finds_what_was_put_into_it},
      {"the index takes less than ten bytes for each row", the_index_takes_less_than_ten_bytes_for_each_row},
      {"rows are found in the buffer and in files", rows_are_found_in_the_buffer_and_in_files},
      {"a walk is in the order of hashes and meets each row once",
       a_walk_is_in_the_order_of_hashes_and_meets_each_row_once},
      {"rows come and go as in a map", rows_come_and_go_as_in_a_map},
      {"readers find every row while files are compacted", readers_find_every_row_while_files_are_compacted},
      {"calls read side by side", calls_read_side_by_side},
      {"rows that move during a walk over heads are met", rows_that_move_during_a_walk_over_heads_are_met},
      {"a snapshot keeps the rows of its moment", a_snapshot_keeps_the_rows_of_its_moment},
      {"links and all other rows are the snapshot", links_and_all_other_rows_are_the_snapshot},
      {"adopted rows are as good as appended ones", adopted_rows_are_as_good_as_appended_ones},
      {"what cannot be adopted is refused", what_cannot_be_adopted_is_refused},
      {"a damaged block is refused by name", a_damaged_block_is_refused_by_name},
      {"files go with their store", files_go_with_their_store},
      {"while nothing can be written no row is lost", while_nothing_can_be_written_no_row_is_lost},
  });
}
