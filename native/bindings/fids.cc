// Python face of fid.h: whole columns at once, without the GIL.
#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>

#include "arrays.h"
#include "bindings.h"
#include "fid.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

template <class Hash>
auto fids(std::size_t count, std::uint32_t slot, int version, Hash&& hash) {
  if (version != 1 && version != 2) throw std::invalid_argument("a fid is of version 1 or 2");
  std::vector<std::int64_t> found(count);
  {
    GilReleased unlocked;
    for (std::size_t i = 0; i < count; ++i) found[i] = make_fid(version, slot, hash(i));
  }
  return owned(std::move(found));
}

auto hash_strings(nb::handle text, const Column<std::int64_t>& splits, std::optional<std::uint32_t> slot,
                  int version) {
  const BorrowedBytes bytes(text);
  const std::span<const std::byte> all = bytes.span();
  if (splits.size() == 0) throw std::invalid_argument("splits must not be empty");
  std::int64_t before = 0;
  for (const std::int64_t split : as_span(splits)) {
    if (split < before || split > static_cast<std::int64_t>(all.size()))
      throw std::invalid_argument("splits must not fall, nor reach beyond the text");
    before = split;
  }
  const auto hash = [&](std::size_t i) {
    return hash_bytes(all.subspan(splits.data()[i], splits.data()[i + 1] - splits.data()[i]));
  };
  if (slot) return fids(splits.size() - 1, *slot, version, hash);
  std::vector<std::int64_t> found(splits.size() - 1);
  {
    GilReleased unlocked;
    for (std::size_t i = 0; i < found.size(); ++i) found[i] = static_cast<std::int64_t>(hash(i));
  }
  return owned(std::move(found));
}

}  // namespace

void bind_fids(nb::module_& m) {
  m.def("hash_strings", &hash_strings, "text"_a, "splits"_a.noconvert(), "slot"_a.none(), "version"_a,
        nb::sig("def hash_strings(text: bytes, splits: NDArray[numpy.int64], slot: int | None, version: int) "
                "-> NDArray[numpy.int64]"),
        "One fid per string, or without a slot its hash; string i is text[splits[i]:splits[i + 1]].");
  m.def(
      "hash_floats",
      [](const Column<float>& values, std::uint32_t slot, int version) {
        return fids(values.size(), slot, version,
                    [&](std::size_t i) { return hash_float(values.data()[i]); });
      },
      "values"_a.noconvert(), "slot"_a, "version"_a,
      nb::sig("def hash_floats(values: NDArray[numpy.float32], slot: int, version: int) -> "
              "NDArray[numpy.int64]"),
      "One fid per number.");
  m.def(
      "hash_integers",
      [](const Column<std::int64_t>& values, std::uint32_t slot, int version) {
        return fids(values.size(), slot, version, [&](std::size_t i) { return mix(values.data()[i]); });
      },
      "values"_a.noconvert(), "slot"_a, "version"_a,
      nb::sig("def hash_integers(values: NDArray[numpy.int64], slot: int, version: int) -> "
              "NDArray[numpy.int64]"),
      "One fid per integer.");
}

}  // namespace monolith
