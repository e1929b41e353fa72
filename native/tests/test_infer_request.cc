#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "check.h"
#include "infer_request.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

const std::string kHead =
    R"({"inputs": [{"name": "user", "datatype": "BYTES", "shape": [2], "data": ["a\u00e9", "bb"]},)"
    R"( {"name": "item", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}}]})";
const std::string kBody = kHead + std::string("\7\0\0\0\0\0\0\0\1\1\0\0\0\0\0\0", 16);

RequestPlan plan() {
  return {{{"item", WireType::kInts, true}, {"user", WireType::kTexts, true}},
          {{1, RawIds::Kind::kHashed, {}, std::nullopt, {}}, {0, RawIds::Kind::kInts, {}, std::nullopt, {}}},
          {}};
}

PackedRows packed_rows() {
  InferRequest request;
  CHECK(read_http_request(bytes(kBody), kHead.size(), request));
  const auto packed = plan().pack(request);
  CHECK(packed.has_value());
  return std::get<PackedRows>(*packed);
}

void bytes_become_ids_of_all_features() {
  const PackedRows packed = packed_rows();
  const auto hash = [](std::string_view text) {
    return static_cast<std::int64_t>(hash_bytes(std::as_bytes(std::span(text))));
  };
  CHECK(packed.ids == (Ids{hash("a\u00e9"), hash("bb"), 7, 257}));
  CHECK(packed.splits == (Ids{0, 1, 2, 3, 4}));
}

void parts_are_joined_to_the_whole() {
  const PackedRows whole = packed_rows();
  const PackedRows first = whole.part(0, 1), rest = whole.part(1, 2);
  const std::vector<const PackedRows*> parts{&first, &rest};
  const PackedRows joined = PackedRows::joined(parts);
  CHECK(joined.ids == whole.ids);
  CHECK(joined.splits == whole.splits);
}

PackedRanking packed_ranking(std::string_view user, std::string_view items, int count) {
  const std::string head = R"({"inputs": [{"name": "user", "datatype": "BYTES", "shape": [1], "data": [)" +
                           std::string(user) + R"(]}, {"name": "item", "datatype": "INT64", "shape": [)" +
                           std::to_string(count) + R"(], "data": [)" + std::string(items) + "]}]}";
  InferRequest request;
  CHECK(read_http_request(bytes(head), head.size(), request));
  const auto packed = plan().pack(request);
  CHECK(packed.has_value());
  return std::get<PackedRanking>(*packed);
}

void a_row_of_a_user_is_packed_once_and_repeated_for_each_item() {
  const PackedRanking one = packed_ranking(R"("ann")", "7, 8", 2),
                      other = packed_ranking(R"("bob")", "9, 7, 5", 3);
  CHECK(one.own == std::string("\1\0", 2));
  CHECK(one.shared.rows == 1 && one.items.rows == 2);
  CHECK(one.items.ids == (Ids{7, 8}));
  const std::vector<const PackedRanking*> parts{&one, &other};
  const PackedRanking joined = PackedRanking::joined(parts);
  CHECK(joined.counts == (Ids{2, 3}));
  const std::int64_t ann = one.shared.ids[0], bob = other.shared.ids[0];
  const auto full = joined.full(10);
  CHECK(full.has_value());
  CHECK(full->ids == (Ids{ann, ann, bob, bob, bob, 7, 8, 9, 7, 5}));
  CHECK(full->splits == (Ids{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  CHECK(!joined.full(9));
  CHECK(other.part(1, 3).full(10)->ids == (Ids{bob, bob, 7, 5}));
}

// Nothing beyond the end is read, wherever a request ends; the sanitizers look on.
void a_request_that_ends_early_is_odd() {
  for (std::size_t size = 0; size < kBody.size(); ++size) {
    const std::vector<char> cut(kBody.begin(), kBody.begin() + static_cast<std::ptrdiff_t>(size));
    InferRequest request;
    CHECK(!read_http_request(bytes({cut.data(), cut.size()}), std::min(size, kHead.size()), request));
    InferRequest other;
    CHECK(!read_grpc_request(bytes({cut.data(), cut.size()}), other));
  }
}

}  // namespace

int main() {
  return check::run({
      {"bytes become ids of all features", bytes_become_ids_of_all_features},
      {"parts are joined to the whole", parts_are_joined_to_the_whole},
      {"a row of a user is packed once and repeated for each item",
       a_row_of_a_user_is_packed_once_and_repeated_for_each_item},
      {"a request that ends early is odd", a_request_that_ends_early_is_odd},
  });
}
