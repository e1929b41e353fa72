// How the values of a row become the bytes of a frozen table.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <stdexcept>

#include "frozen_format.h"
#include "quantize.h"

namespace monolith {

// Writes `row_bytes` bytes for the values of all segments, which are finite. Calls note(given, decoded) for
// each value that may be read as another than was given.
template <class Note>
void frozen_encode(std::span<const FrozenSegment> segments, const float* values, std::byte* row,
                   std::size_t row_bytes, Note&& note) {
  constexpr float kLargestHalf = 65504.0f;
  std::byte* at = row;
  for (const FrozenSegment& segment : segments) {
    switch (segment.coding) {
      case FrozenCoding::kFp32:
        std::memcpy(at, values, segment.bytes());
        break;
      case FrozenCoding::kFp16:
        for (std::uint32_t i = 0; i < segment.dim; ++i) {
          // What is too large for a half becomes the largest one, not infinity.
          const std::uint16_t half = half_of(std::clamp(values[i], -kLargestHalf, kLargestHalf));
          std::memcpy(at + 2 * i, &half, sizeof half);
          note(values[i], float_of(half));
        }
        break;
      case FrozenCoding::kInt8:
      case FrozenCoding::kInt4: {
        const float most = frozen_steps(segment.coding);
        float largest = 0;
        for (std::uint32_t i = 0; i < segment.dim; ++i) largest = std::max(largest, std::abs(values[i]));
        float scale = largest / most;
        if (!std::isfinite(scale * most)) scale = std::nextafter(scale, 0.0f);  // of the very largest floats
        std::memcpy(at, &scale, sizeof scale);
        auto* const codes = reinterpret_cast<std::uint8_t*>(at + sizeof scale);
        for (std::uint32_t i = 0; i < segment.dim; ++i) {
          // A scale of 0 is that of values too small to be told from it.
          const float steps = scale > 0 ? std::nearbyint(values[i] / scale) : 0.0f;
          const auto code = static_cast<std::int8_t>(std::clamp(steps, -most, most));
          if (segment.coding == FrozenCoding::kInt8)
            codes[i] = static_cast<std::uint8_t>(code);
          else if (i % 2 == 0)
            codes[i / 2] = code & 15;
          else
            codes[i / 2] = static_cast<std::uint8_t>(codes[i / 2] | code << 4);
          note(values[i], static_cast<float>(code) * scale);
        }
        break;
      }
      default:
        throw std::invalid_argument("unknown coding");
    }
    at += segment.bytes();
    values += segment.dim;
  }
  std::fill(at, row + row_bytes, std::byte{0});
}

}  // namespace monolith
