#include <random>
#include <string_view>

#include "check.h"
#include "snappy.h"

namespace {

using namespace monolith;
using Bytes = std::vector<std::byte>;

Bytes bytes(std::string_view text) {
  Bytes result;
  for (const char c : text) result.push_back(static_cast<std::byte>(c));
  return result;
}

void literals_and_copies() {
  Bytes out;
  CHECK_EQUAL(snappy_decode(bytes(std::string_view("\x03\x08"
                                                   "abc")),
                            out),
              "");
  CHECK(out == bytes("abc"));
  CHECK_EQUAL(snappy_decode(bytes(std::string_view("\x09\x04"
                                                   "ab\x1a\x02\x00",
                                                   7)),
                            out),
              "");
  CHECK(out == bytes("ababababa"));
}

// Any bytes at all end in an answer. What counts is what the sanitizers say while this runs.
void noise_ends_in_an_answer() {
  std::mt19937 random(1);
  Bytes out;
  for (int i = 0; i < 20'000; ++i) {
    Bytes block(random() % 40);
    for (std::byte& one : block) one = static_cast<std::byte>(random() % (i % 2 ? 256 : 16));
    if (snappy_decode(block, out).empty()) CHECK(out.size() <= 32 * block.size());
  }
}

}  // namespace

int main() {
  return monolith::check::run(
      {{"literals and copies", literals_and_copies}, {"noise ends in an answer", noise_ends_in_an_answer}});
}
