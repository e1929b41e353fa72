#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "kept_memory.h"

namespace {

using namespace monolith;
constexpr std::size_t kMegabyte = 1 << 20;

void a_block_that_came_back_is_handed_out_again() {
  const auto memory = std::make_shared<KeptMemory>();
  std::byte* first = nullptr;
  {
    const auto block = memory->take(10 * kMegabyte);
    first = block.data();
    std::memset(block.data(), 1, 10 * kMegabyte);
    CHECK(memory->take(10 * kMegabyte).data() != first);
  }
  const std::size_t kept = memory->bytes();
  CHECK(kept >= 20 * kMegabyte);
  const auto larger = memory->take(11 * kMegabyte);  // a little more is there
  const auto again = memory->take(9 * kMegabyte);
  CHECK(larger.data() == first || again.data() == first);
  CHECK_EQUAL(memory->bytes(), 0u);
}

void a_block_far_too_large_stays() {
  const auto memory = std::make_shared<KeptMemory>();
  (void)memory->take(100 * kMegabyte);
  const std::size_t kept = memory->bytes();
  const auto block = memory->take(2 * kMegabyte);
  CHECK_EQUAL(memory->bytes(), kept);
}

void what_nobody_wants_is_let_go() {
  const auto memory = std::make_shared<KeptMemory>();
  (void)memory->take(100 * kMegabyte);
  for (std::uint64_t i = 0; i < KeptMemory::kTurns; ++i) (void)memory->take(2 * kMegabyte);
  CHECK(memory->bytes() > 100 * kMegabyte);
  (void)memory->take(2 * kMegabyte);
  CHECK(memory->bytes() < 10 * kMegabyte);
}

void small_blocks_are_not_kept() {
  const auto memory = std::make_shared<KeptMemory>();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, KeptMemory::kLarge - 1}) {
    const auto block = memory->take(bytes);
    CHECK(block.data() != nullptr);
    CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(block.data()) % 64, 0u);
    std::memset(block.data(), 1, bytes);
  }
  CHECK_EQUAL(memory->bytes(), 0u);
}

void blocks_outlive_whoever_handed_them_out() {
  KeptArray<float> array;
  {
    const auto memory = std::make_shared<KeptMemory>();
    array = KeptArray<float>(*memory, 3 * kMegabyte);
  }
  array[array.size() - 1] = 7;
  CHECK_EQUAL(array[3 * kMegabyte - 1], 7.0f);
}

void threads_never_share_a_block() {
  const auto memory = std::make_shared<KeptMemory>();
  std::vector<int> wrong(4);
  std::vector<std::thread> team;
  for (int t = 0; t < 4; ++t)
    team.emplace_back([&, t] {
      for (int turn = 0; turn < 50; ++turn) {
        const KeptArray<std::int32_t> block(*memory, (1 + t % 2) * kMegabyte);
        for (std::size_t i = 0; i < block.size(); i += 4096) block[i] = t;
        std::this_thread::yield();
        for (std::size_t i = 0; i < block.size(); i += 4096) wrong[t] += block[i] != t;
      }
    });
  for (auto& thread : team) thread.join();
  CHECK(wrong == std::vector<int>(4));
}

}  // namespace

int main() {
  return check::run({
      {"a block that came back is handed out again", a_block_that_came_back_is_handed_out_again},
      {"a block far too large stays", a_block_far_too_large_stays},
      {"what nobody wants is let go", what_nobody_wants_is_let_go},
      {"small blocks are not kept", small_blocks_are_not_kept},
      {"blocks outlive whoever handed them out", blocks_outlive_whoever_handed_them_out},
      {"threads never share a block", threads_never_share_a_block},
  });
}
