#include "entry.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "hash.h"
#include "narrow.h"
#include "quantize.h"

namespace monolith {
namespace {

std::size_t bytes_per_value(CompressorKind kind) {
  switch (kind) {
    case CompressorKind::kFp32:
      return 4;
    case CompressorKind::kFp16:
      return 2;
    case CompressorKind::kFixedR8:
      return 1;
    case CompressorKind::kOneBit:
      return 1;
  }
  return 4;
}

}  // namespace

Entry::Entry(std::vector<SegmentSpec> segments, bool serving, std::uint64_t seed, ValueStorage storage)
    : scales_(new std::atomic<float>[std::max<std::size_t>(segments.size(), 1)]),
      decays_(new std::atomic<float>[std::max<std::size_t>(segments.size(), 1)]),
      seed_(mix(seed)),
      serving_(serving),
      storage_(storage) {
  if (segments.empty()) throw std::invalid_argument("entry: at least one segment is needed");
  std::size_t byte = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const SegmentSpec& spec = segments[i];
    if (spec.dim < 1) throw std::invalid_argument("entry: segment " + std::to_string(i) + " has no dim");
    if (spec.optimizer.kind == OptimizerKind::kBatchSoftmax && spec.dim != 1)
      throw std::invalid_argument("entry: batch_softmax needs a segment of dim 1");
    parts_.push_back({spec, step_kernels(spec.optimizer.kind, spec.dim).one, dim_, state_dim_, byte});
    if (spec.optimizer.lazy_decay && spec.optimizer.kind != OptimizerKind::kDynamicWdAdagrad)
      throw std::invalid_argument("entry: only dynamic_wd_adagrad decays lazily");
    scales_[i] = spec.compressor.init_scale;
    decays_[i] = spec.optimizer.decay_rate * spec.optimizer.weight_decay;
    byte += bytes_per_value(spec.compressor.kind) * spec.dim;
    dim_ += spec.dim;
    if (!serving) {
      state_dim_ += static_cast<int>(state_floats(spec.optimizer.kind, spec.dim));
      delay_compensated_ |= spec.optimizer.delay_compensated;
      counts_steps_ |= spec.optimizer.kind == OptimizerKind::kBatchSoftmax || spec.optimizer.lazy_decay;
      decays_lazily_ |= spec.optimizer.lazy_decay;
      has_view_ |=
          spec.compressor.kind == CompressorKind::kFixedR8 || spec.compressor.kind == CompressorKind::kOneBit;
    }
  }
  // With no state, or one float of it for each value, segments side by side are as good as one: a bias and a
  // vector that differ in how they are born, say.
  const OptimizerSpec& first = parts_[0].spec.optimizer;
  const bool by_element = state_floats(first.kind, 2) == 0 || state_floats(first.kind, 2) == 2;
  const bool alike = std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    return part.spec.optimizer == first && part.spec.compressor.kind != CompressorKind::kOneBit;
  });
  if (!serving && alike &&
      (parts_.size() == 1 || (by_element && first.kind != OptimizerKind::kBatchSoftmax)) &&
      !first.delay_compensated && !first.stochastic_rounding)
    plain_ = step_kernels(first.kind, dim_);
  const bool narrow = storage.coding != ValueCoding::kFloat32 && !serving;
  value_bytes_ = dim_ * sizeof(float);
  if (narrow) {
    narrow_.dim = dim_;
    for (const Part& part : parts_) narrow_.widths.push_back(part.spec.dim);
    kernels_ = narrow_kernels(storage.coding, dim_);
    value_bytes_ = narrow_bytes(storage.coding, narrow_);
  }
  state_byte_ = (value_bytes_ + sizeof(float) - 1) / sizeof(float) * sizeof(float);
  row_bytes_ = serving ? byte : state_byte_ + state_dim_ * sizeof(float);
  const std::size_t padded = narrow ? 8 : 16;
  row_bytes_ = (row_bytes_ + padded - 1) / padded * padded;
}

float Entry::random(std::uint64_t salt, int column) const {
  return draw(salt, seed_, column);
}

void Entry::initialize(std::byte* row, std::int64_t id) const {
  const std::uint64_t salt = mix(id);
  const auto value = [&](const Part& part, int i) {
    const InitializerSpec& init = part.spec.initializer;
    if (init.low == init.high) return init.low;
    return init.low + (init.high - init.low) * random(salt, part.column + i);
  };
  const auto fill = [&](float* values) {
    for (const Part& part : parts_)
      for (int i = 0; i < part.spec.dim; ++i) values[part.column + i] = value(part, i);
  };
  if (stores_floats()) {
    fill(reinterpret_cast<float*>(row));
  } else {
    std::vector<float> values(dim_);
    fill(values.data());
    write(row, values.data());
  }
  initialize_state(row);
}

void Entry::initialize_state(std::byte* row) const {
  if (!serving_) initialize_state(state(row));
}

void Entry::initialize_state(float* state) const {
  for (const Part& part : parts_)
    monolith::initialize_state(part.spec.optimizer, state + part.state, part.spec.dim);
}

void Entry::read_values(const std::byte* rows, std::size_t count, float* values) const {
  if (stores_floats())
    std::memcpy(values, rows, count * value_bytes_);
  else
    kernels_.widen(narrow_, rows, values, count);
}

void Entry::read(const std::byte* row, float* values) const {
  if (!serving_) {
    read_values(row, 1, values);
    return;
  }
  for (const Part& part : parts_) {
    const std::byte* from = row + part.byte;
    float* to = values + part.column;
    const CompressorSpec& comp = part.spec.compressor;
    switch (comp.kind) {
      case CompressorKind::kFp32:
        std::memcpy(to, from, part.spec.dim * sizeof(float));
        break;
      case CompressorKind::kFp16:
        for (int i = 0; i < part.spec.dim; ++i) {
          std::uint16_t half;
          std::memcpy(&half, from + 2 * i, 2);
          to[i] = float_of(half);
        }
        break;
      case CompressorKind::kFixedR8:
        for (int i = 0; i < part.spec.dim; ++i)
          to[i] = r8_value(static_cast<std::int8_t>(from[i]), comp.range);
        break;
      case CompressorKind::kOneBit:
        for (int i = 0; i < part.spec.dim; ++i)
          to[i] = static_cast<std::int8_t>(from[i]) > 0 ? comp.amplitude : -comp.amplitude;
        break;
    }
  }
}

void Entry::write_stepped(std::byte* row, std::uint64_t hash, const float* values, std::int64_t step) const {
  if (storage_.by_chance && !stores_floats())
    kernels_.round_by_chance(narrow_, values, row, rounding_key(hash, seed_, step));
  else
    write(row, values);
}

void Entry::write(std::byte* row, const float* values) const {
  if (!serving_) {
    if (stores_floats())
      std::memcpy(row, values, value_bytes_);
    else
      kernels_.round_to_nearest(narrow_, values, row);
    return;
  }
  for (const Part& part : parts_) {
    std::byte* to = row + part.byte;
    const float* from = values + part.column;
    const CompressorSpec& comp = part.spec.compressor;
    switch (comp.kind) {
      case CompressorKind::kFp32:
        std::memcpy(to, from, part.spec.dim * sizeof(float));
        break;
      case CompressorKind::kFp16:
        for (int i = 0; i < part.spec.dim; ++i) {
          const std::uint16_t half = half_of(from[i]);
          std::memcpy(to + 2 * i, &half, 2);
        }
        break;
      case CompressorKind::kFixedR8:
        for (int i = 0; i < part.spec.dim; ++i) to[i] = static_cast<std::byte>(r8_code(from[i], comp.range));
        break;
      case CompressorKind::kOneBit:
        for (int i = 0; i < part.spec.dim; ++i) to[i] = static_cast<std::byte>(from[i] > 0 ? 1 : -1);
        break;
    }
  }
}

void Entry::view(float* values) const {
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    const CompressorSpec& comp = part.spec.compressor;
    float* x = values + part.column;
    if (comp.kind == CompressorKind::kFixedR8) {
      for (int i = 0; i < part.spec.dim; ++i) x[i] = r8_value(r8_code(x[i], comp.range), comp.range);
    } else if (comp.kind == CompressorKind::kOneBit) {
      const float scale = scales_[p].load(std::memory_order_relaxed);
      for (int i = 0; i < part.spec.dim; ++i) x[i] = one_bit_forward(x[i], scale, comp.amplitude);
    }
  }
}

float Entry::kept(std::size_t p, const float* state) const {
  const Part& part = parts_[p];
  const std::int64_t now = steps_.load(std::memory_order_relaxed);
  const std::int64_t seen = step_of(state + part.state + part.spec.dim);
  return seen == 0 || seen >= now ? 1.0f : kept_after(decays_[p].load(std::memory_order_relaxed), now - seen);
}

void Entry::read_decayed(const std::byte* row, float* values) const {
  read_values(row, 1, values);
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    if (!part.spec.optimizer.lazy_decay) continue;
    const float left = kept(p, state(row));
    for (int i = 0; i < part.spec.dim; ++i) values[part.column + i] *= left;
  }
}

void Entry::catch_up(std::byte* row) const {
  std::vector<float> values(dim_);
  read_decayed(row, values.data());
  write(row, values.data());
  const std::int64_t now = steps_.load(std::memory_order_relaxed);
  for (const Part& part : parts_) {
    if (!part.spec.optimizer.lazy_decay) continue;
    float* const counter = state(row) + part.state + part.spec.dim;
    const std::int64_t seen = step_of(counter);
    if (seen != 0 && seen < now) put_step(counter, now);
  }
}

void Entry::note_steps(const float* state) {
  for (const Part& part : parts_) {
    if (!part.spec.optimizer.lazy_decay) continue;
    const std::int64_t seen = step_of(state + part.state + part.spec.dim);
    be_at(seen);
  }
}

void Entry::be_at(std::int64_t steps) {
  std::int64_t known = steps_.load(std::memory_order_relaxed);
  while (steps > known && !steps_.compare_exchange_weak(known, steps)) {
  }
}

void Entry::step(float* values, float* state, std::int64_t id, const float* gradient, const float* latest,
                 const float* rates, std::int64_t step, float* scratch) const {
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    const int dim = part.spec.dim;
    const OptimizerSpec& opt = part.spec.optimizer;
    const CompressorSpec& comp = part.spec.compressor;
    float* w = values + part.column;
    const float* g = gradient + part.column;
    if (comp.kind == CompressorKind::kOneBit) {
      const float scale = scales_[p].load(std::memory_order_relaxed);
      for (int i = 0; i < dim; ++i) scratch[i] = g[i] * one_bit_slope(w[i], scale, comp.amplitude);
      g = scratch;
    }
    if (opt.delay_compensated) {
      for (int i = 0; i < dim; ++i)
        scratch[i] = g[i] + opt.lambda * g[i] * g[i] * (w[i] - latest[part.column + i]);
      g = scratch;
    }
    part.kernel(opt, w, state + part.state, g, dim, rates[p], step);
    if (opt.stochastic_rounding) {
      const std::uint64_t salt = mix(id) + mix(step);
      for (int i = 0; i < dim; ++i)
        w[i] = round_to_half(w[i], random(salt + std::bit_cast<std::uint32_t>(w[i]), part.column + i));
    }
  }
}

void Entry::step_rounded(std::byte* const* rows, const std::uint64_t* hashes, const float* const* gradients,
                         std::size_t count, float rate, std::int64_t step, float* scratch) const {
  const NarrowStep by{plain_spec(), plain_.one,         narrow_, row_bytes_, state_byte_,
                      seed_,        storage_.by_chance, rate,    step};
  kernels_.step(by, rows, hashes, gradients, count, scratch);
}

void Entry::begin_step(std::int64_t step, const float* rates) {
  if (decays_lazily_) {
    for (std::size_t p = 0; p < parts_.size(); ++p)
      decays_[p].store(rates[p] * parts_[p].spec.optimizer.weight_decay, std::memory_order_relaxed);
    be_at(step + 1);
  }
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    const CompressorSpec& comp = parts_[p].spec.compressor;
    if (serving_ || comp.kind != CompressorKind::kOneBit || step % comp.step_size != 0) continue;
    const auto grown =
        static_cast<float>(comp.init_scale * std::sqrt(1.0 + 0.005 * static_cast<double>(step)));
    scales_[p].store(std::min(grown, comp.max_scale), std::memory_order_relaxed);
  }
}

std::vector<float> Entry::scales() const {
  std::vector<float> all(parts_.size());
  for (std::size_t p = 0; p < parts_.size(); ++p) all[p] = scales_[p].load(std::memory_order_relaxed);
  return all;
}

void Entry::set_scales(const std::vector<float>& scales) {
  if (scales.size() != parts_.size()) throw std::invalid_argument("entry: one scale per segment is needed");
  for (std::size_t p = 0; p < parts_.size(); ++p) scales_[p].store(scales[p], std::memory_order_relaxed);
}

}  // namespace monolith
