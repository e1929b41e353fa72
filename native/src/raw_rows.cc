#include "raw_rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "prefetch.h"

namespace monolith {
namespace {

constexpr std::size_t kGrain = 4096;
constexpr std::size_t kAhead = 12;

// The usual widths are spelled out, as in the table itself; 0 is any.
template <std::size_t kCopied>
void gather_rows(const float* all, std::size_t stride, std::size_t any_copied, const std::uint32_t* positions,
                 std::size_t begin, std::size_t end, float* out) {
  const std::size_t copied = kCopied != 0 ? kCopied : any_copied;
  for (std::size_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      const auto* next = reinterpret_cast<const std::byte*>(all + positions[i + kAhead] * stride);
      for (std::size_t line = 0; line < copied * sizeof(float); line += kLine)
        __builtin_prefetch(next + line);
    }
    std::memcpy(out + i * copied, all + positions[i] * stride, copied * sizeof(float));
  }
}

// A function of its own: only of its arguments does the compiler believe that they do not overlap, and
// without that the limit would be that of single floats.
template <std::size_t kWidth>
void change_row(float* __restrict values, float* __restrict state, const float* __restrict gradient,
                std::size_t any_width) {
  const std::size_t width = kWidth != 0 ? kWidth : any_width;
  for (std::size_t j = 0; j < width; ++j) {
    values[j] -= gradient[j];
    state[j] += gradient[j];
  }
}

template <std::size_t kWidth>
void update_rows(float* all, std::size_t any_width, const std::uint32_t* positions, std::size_t begin,
                 std::size_t end, const float* gradients) {
  const std::size_t width = kWidth != 0 ? kWidth : any_width;
  const std::size_t stride = 2 * width;
  for (std::size_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      const auto* next = reinterpret_cast<const std::byte*>(all + positions[i + kAhead] * stride);
      for (std::size_t line = 0; line < stride * sizeof(float); line += kLine)
        __builtin_prefetch(next + line, 1);
    }
    float* const row = all + positions[i] * stride;
    change_row<kWidth>(row, row + width, gradients + i * width, width);
  }
}

}  // namespace

RawRows::RawRows(std::size_t rows, std::size_t width, std::shared_ptr<Workers> workers)
    : rows_(rows), width_(width), workers_(std::move(workers)), memory_(rows * 2 * width * sizeof(float)) {
  auto* data = reinterpret_cast<float*>(memory_.data());
  std::fill_n(data, rows * 2 * width, 1.0f);  // touch every page now
}

template <class Each>
void RawRows::spread(std::span<const std::uint32_t> positions, Each&& each) const {
  const std::size_t tasks = (positions.size() + kGrain - 1) / kGrain;
  workers_->run(tasks, [&](std::size_t task) {
    const std::size_t begin = task * kGrain;
    const std::size_t end = std::min(positions.size(), begin + kGrain);
    if (*std::max_element(positions.begin() + begin, positions.begin() + end) >= rows_)
      throw std::invalid_argument("raw rows: a position is past the last row");
    each(begin, end);
  });
}

void RawRows::gather(std::span<const std::uint32_t> positions, std::size_t copied, float* out) const {
  const auto* all = reinterpret_cast<const float*>(memory_.data());
  const auto kernel = copied == 16    ? gather_rows<16>
                      : copied == 32  ? gather_rows<32>
                      : copied == 64  ? gather_rows<64>
                      : copied == 128 ? gather_rows<128>
                      : copied == 256 ? gather_rows<256>
                                      : gather_rows<0>;
  spread(positions, [&](std::size_t begin, std::size_t end) {
    kernel(all, 2 * width_, copied, positions.data(), begin, end, out);
  });
}

void RawRows::update(std::span<const std::uint32_t> positions, const float* gradients) {
  auto* all = reinterpret_cast<float*>(memory_.data());
  const auto kernel = width_ == 16    ? update_rows<16>
                      : width_ == 32  ? update_rows<32>
                      : width_ == 64  ? update_rows<64>
                      : width_ == 128 ? update_rows<128>
                                      : update_rows<0>;
  spread(positions, [&](std::size_t begin, std::size_t end) {
    kernel(all, width_, positions.data(), begin, end, gradients);
  });
}

}  // namespace monolith
