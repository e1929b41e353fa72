// Python face of checksum.h: borrows any contiguous buffer, adds no behaviour.
#include "checksum.h"

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

constexpr std::size_t kWorthReleasing = 64 << 10;  // below, passing the GIL around costs more than the sum

std::uint32_t checksum(nb::handle buffer, std::uint32_t seed) {
  const BorrowedBytes bytes(buffer);
  if (bytes.span().size() < kWorthReleasing) return crc32c(bytes.span(), seed);
  GilReleased unlocked;
  return crc32c(bytes.span(), seed);
}

}  // namespace

void bind_checksum(nb::module_& m) {
  m.def("crc32c", &checksum, "buffer"_a, "seed"_a = 0,
        "CRC-32C of the bytes of `buffer`; `seed` is the CRC of the bytes before them.");
  m.def(
      "masked_crc32c", [](nb::handle buffer) { return masked(checksum(buffer, 0)); }, "buffer"_a,
      "CRC-32C as a TFRecord stores it.");
}

}  // namespace monolith
