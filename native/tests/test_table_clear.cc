// clear() when memory is short: it throws, changes nothing, and writers go on.
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "table.h"
#include "touched_key_set.h"

namespace {

thread_local int allocations_left = -1;  // of this thread, until one fails; below 0 none does

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace {

using namespace monolith;

void a_clear_without_memory_changes_nothing_and_holds_no_writer_off() {
  TableSpec spec;
  SegmentSpec segment;
  segment.dim = 2;
  segment.optimizer.kind = OptimizerKind::kSgd;
  spec.segments = {segment};
  Table table(spec);
  table.track_changes(true);
  const auto touched = std::make_shared<TouchedKeySet>(1000);
  table.touch(touched);

  std::int64_t next = 0;
  const auto insert = [&] {
    const std::vector<std::int64_t> ids{next++};
    const std::vector<float> values{1, 2};
    table.assign(ids, values.data(), EventTimes());
  };
  insert();

  int failed = 0;
  for (bool cleared = false; !cleared; ++failed) {
    allocations_left = failed;
    try {
      table.clear(0);
      cleared = true;
    } catch (const std::exception&) {
    }
    allocations_left = -1;
    if (cleared) break;
    const std::size_t rows = table.size();
    CHECK_EQUAL(rows, static_cast<std::size_t>(next));
    std::packaged_task<void()> write(insert);
    std::future<void> written = write.get_future();
    std::thread writer(std::move(write));
    if (written.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      std::cout << "a writer waits for good after allocation " << failed << " of clear() failed" << std::endl;
      std::_Exit(1);
    }
    writer.join();
  }
  CHECK(failed > 5);  // there were allocations to fail
  CHECK_EQUAL(table.size(), std::size_t{0});
  insert();
  CHECK_EQUAL(table.size(), std::size_t{1});
}

}  // namespace

int main() {
  return check::run({
      {"a clear() without memory changes nothing and holds no writer off",
       a_clear_without_memory_changes_nothing_and_holds_no_writer_off},
  });
}
