#include "infer_request.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "json_scanner.h"
#include "proto_reader.h"
#include "texts.h"

namespace monolith {
namespace {

constexpr std::size_t kMostInputs = 4096;
constexpr std::size_t kMostTexts = 1 << 20;  // of one input
constexpr std::size_t kMostName = 1024;
constexpr std::size_t kLengthBytes = 4;

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::optional<WireType> type_of(std::string_view datatype) {
  if (datatype == "INT64") return WireType::kInts;
  if (datatype == "FP32") return WireType::kFloats;
  if (datatype == "BYTES") return WireType::kTexts;
  return std::nullopt;
}

// Sets the rows of an input of the shape (rows,) or (rows, 1).
bool set_shape(std::span<const std::int64_t> shape, InferRequest::Input& input) {
  if (shape.empty() || shape.size() > 2 || shape[0] < 1 || (shape.size() == 2 && shape[1] != 1)) return false;
  input.rows = static_cast<std::size_t>(shape[0]);
  input.is_flat = shape.size() == 1;
  return true;
}

template <class T>
bool add_numbers(std::span<const std::byte> raw, std::size_t rows, std::vector<T>& values) {
  if (raw.size() % sizeof(T) != 0 || raw.size() / sizeof(T) != rows) return false;
  values.resize(values.size() + rows);
  std::memcpy(values.data() + values.size() - rows, raw.data(), raw.size());  // it need not be aligned
  return true;
}

bool add_texts(std::span<const std::byte> raw, std::size_t rows, std::vector<std::string_view>& texts) {
  if (rows > kMostTexts || raw.size() / kLengthBytes < rows) return false;
  for (std::size_t row = 0; row < rows; ++row) {
    std::uint32_t size = 0;
    if (raw.size() < kLengthBytes) return false;
    std::memcpy(&size, raw.data(), kLengthBytes);
    raw = raw.subspan(kLengthBytes);
    if (size > raw.size()) return false;
    texts.push_back(as_text(raw.first(size)));
    raw = raw.subspan(size);
  }
  return raw.empty();
}

// Adds the values of an input whose type and rows are known.
bool add_raw(std::span<const std::byte> raw, InferRequest::Input& input, InferRequest& request) {
  switch (input.type) {
    case WireType::kInts:
      input.begin = request.ints.size();
      return add_numbers(raw, input.rows, request.ints);
    case WireType::kFloats:
      input.begin = request.floats.size();
      return add_numbers(raw, input.rows, request.floats);
    case WireType::kTexts:
      input.begin = request.texts.size();
      return add_texts(raw, input.rows, request.texts);
  }
  return false;
}

// gRPC

// Adds the values of an InferTensorContents.
bool add_contents(std::span<const std::byte> contents, InferRequest::Input& input, InferRequest& request) {
  enum Field : std::uint8_t { kInt64Contents = 3, kFp32Contents = 6, kBytesContents = 8 };
  ProtoReader reader(contents);
  std::size_t count = 0;
  if (input.type == WireType::kTexts && input.rows > kMostTexts) return false;
  if (input.rows > contents.size()) return false;  // each takes a byte at least
  switch (input.type) {
    case WireType::kInts:
      input.begin = request.ints.size();
      while (reader.next()) {
        if (reader.is(kInt64Contents, kVarint)) {
          request.ints.push_back(static_cast<std::int64_t>(reader.varint()));
        } else if (reader.is(kInt64Contents, kBytes)) {
          ProtoReader packed(reader.bytes());
          while (!packed.at_end()) request.ints.push_back(static_cast<std::int64_t>(packed.varint()));
        } else {
          return false;
        }
      }
      count = request.ints.size() - input.begin;
      break;
    case WireType::kFloats:
      input.begin = request.floats.size();
      request.floats.resize(input.begin + input.rows);
      while (reader.next()) {
        if (!reader.is(kFp32Contents, kBytes) && !reader.is(kFp32Contents, kFixed32)) return false;
        count = reader.floats(request.floats.data() + input.begin, count, input.rows);
      }
      break;
    case WireType::kTexts:
      input.begin = request.texts.size();
      while (reader.next()) {
        if (!reader.is(kBytesContents, kBytes)) return false;
        request.texts.push_back(as_text(reader.bytes()));
      }
      count = request.texts.size() - input.begin;
      break;
  }
  return count == input.rows;
}

// Reads an InferInputTensor; its contents, if it has any, are left to be added.
bool read_input(std::span<const std::byte> message, InferRequest::Input& input,
                std::optional<std::span<const std::byte>>& contents) {
  enum Field : std::uint8_t { kName = 1, kDatatype = 2, kShape = 3, kContents = 5 };
  ProtoReader reader(message);
  std::int64_t shape[3] = {};
  std::size_t dimensions = 0;
  std::string_view datatype;
  const auto add_size = [&](std::uint64_t size) {
    if (dimensions < 3) shape[dimensions++] = static_cast<std::int64_t>(size);
  };
  while (reader.next()) {
    if (reader.is(kName, kBytes)) {
      input.name = as_text(reader.bytes());
    } else if (reader.is(kDatatype, kBytes)) {
      datatype = as_text(reader.bytes());
    } else if (reader.is(kShape, kVarint)) {
      add_size(reader.varint());
    } else if (reader.is(kShape, kBytes)) {
      ProtoReader packed(reader.bytes());
      while (!packed.at_end()) add_size(packed.varint());
    } else if (reader.is(kContents, kBytes) && !contents) {
      contents = reader.bytes();
    } else {
      return false;
    }
  }
  const std::optional<WireType> type = type_of(datatype);
  if (!type || !set_shape({shape, dimensions}, input)) return false;
  input.type = *type;
  return true;
}

bool read_message(std::span<const std::byte> message, InferRequest& request) {
  enum Field : std::uint8_t { kModel = 1, kVersion = 2, kId = 3, kInputs = 5, kOutputs = 6, kRaw = 7 };
  ProtoReader reader(message);
  std::vector<std::span<const std::byte>> raws;
  std::vector<std::optional<std::span<const std::byte>>> contents;
  while (reader.next()) {
    if (reader.wire() != kBytes) return false;
    const std::span<const std::byte> bytes = reader.bytes();
    switch (reader.field()) {
      case kModel:
        request.model = as_text(bytes);
        break;
      case kVersion:
        request.version = as_text(bytes);
        break;
      case kId:
        request.id = as_text(bytes);
        break;
      case kInputs:
        if (request.inputs.size() == kMostInputs) return false;
        if (!read_input(bytes, request.inputs.emplace_back(), contents.emplace_back())) return false;
        break;
      case kOutputs: {
        if (request.outputs.size() == kMostInputs) return false;
        ProtoReader output(bytes);
        std::string& name = request.outputs.emplace_back().name;
        while (output.next()) {
          if (!output.is(1, kBytes)) return false;
          name = as_text(output.bytes());
        }
        break;
      }
      case kRaw:
        if (raws.size() == kMostInputs) return false;
        raws.push_back(bytes);
        break;
      default:
        return false;
    }
  }
  request.typed = raws.empty();
  if (!request.typed && raws.size() != request.inputs.size()) return false;
  for (std::size_t i = 0; i < request.inputs.size(); ++i) {
    InferRequest::Input& input = request.inputs[i];
    if (request.typed != contents[i].has_value()) return false;
    if (!(request.typed ? add_contents(*contents[i], input, request) : add_raw(raws[i], input, request)))
      return false;
  }
  return !request.inputs.empty();
}

// HTTP

// Reads the JSON of a request. Every function returns false if something is odd.
class HeadReader {
 public:
  HeadReader(std::string_view head, std::span<const std::byte> rest, InferRequest& request)
      : scanner_(head), rest_(rest), request_(request) {}

  bool read() {
    scanner_.skip_blanks();
    const bool fine = object([this](std::string_view key) {
      if (key == "id") return text(request_.id) && request_.id.size() <= kMostName;
      if (key == "inputs") return list([this] { return input(); });
      if (key == "outputs") return list([this] { return output(); });
      if (key == "parameters")
        return object([this](std::string_view name) {
          return name == "binary_data_output" && flag(request_.binary_outputs);
        });
      return false;
    });
    scanner_.skip_blanks();
    return fine && scanner_.ended() && rest_.empty() && !request_.inputs.empty();
  }

 private:
  // Calls `each` with every key, at its value. A key twice is odd.
  template <class Each>
  bool object(Each&& each) {
    if (!scanner_.take('{')) return false;
    scanner_.skip_blanks();
    if (scanner_.take('}')) return true;
    std::vector<std::string> keys;
    do {
      std::string key;
      scanner_.skip_blanks();
      if (!text(key) || std::find(keys.begin(), keys.end(), key) != keys.end()) return false;
      scanner_.skip_blanks();
      if (!scanner_.take(':')) return false;
      scanner_.skip_blanks();
      if (!each(key)) return false;
      keys.push_back(std::move(key));
      scanner_.skip_blanks();
    } while (scanner_.take(','));
    return scanner_.take('}');
  }

  template <class Each>
  bool list(Each&& each) {
    if (!scanner_.take('[')) return false;
    scanner_.skip_blanks();
    if (scanner_.take(']')) return true;
    do {
      scanner_.skip_blanks();
      if (!each()) return false;
      scanner_.skip_blanks();
    } while (scanner_.take(','));
    return scanner_.take(']');
  }

  bool text(std::string& found) {
    found.clear();
    return scanner_.text([&](std::string_view part) { found += part; });
  }

  bool flag(bool& found) {
    found = scanner_.peek() == 't';
    return scanner_.take_word(found ? "true" : "false");
  }

  bool whole(std::int64_t& found) {
    std::string_view digits;
    bool is_whole = false;
    return scanner_.number(digits, is_whole) && is_whole && read_whole(digits, found).empty();
  }

  bool output() {
    if (request_.outputs.size() == kMostInputs) return false;
    InferRequest::Output& one = request_.outputs.emplace_back();
    bool has_name = false;
    return object([&](std::string_view key) {
             if (key == "name") return has_name = text(one.name) && one.name.size() <= kMostName;
             return key == "parameters" && object([&](std::string_view name) {
                      bool binary = false;
                      if (name != "binary_data" || !flag(binary)) return false;
                      one.binary = binary;
                      return true;
                    });
           }) &&
           has_name;
  }

  bool input() {
    if (request_.inputs.size() == kMostInputs) return false;
    InferRequest::Input one;
    std::string name;
    std::optional<WireType> type;
    std::vector<std::int64_t> shape;
    std::optional<std::int64_t> size;
    bool has_data = false;
    const bool fine = object([&](std::string_view key) {
      if (key == "name") return text(name);
      if (key == "datatype") {
        std::string datatype;
        if (!text(datatype)) return false;
        type = type_of(datatype);
        return type.has_value();
      }
      if (key == "shape")
        return list([&] { return shape.size() < 2 && whole(shape.emplace_back()); }) && set_shape(shape, one);
      if (key == "parameters")
        return object([&](std::string_view parameter) {
          return parameter == "binary_data_size" && whole(size.emplace());
        });
      if (key != "data" || !type || one.rows == 0) return false;  // its values cannot be told before
      one.type = *type;
      has_data = true;
      return data(one);
    });
    if (!fine || !type || one.rows == 0 || has_data == size.has_value()) return false;
    one.type = *type;
    request_.names.push_back(std::move(name));
    one.name = request_.names.back();
    if (size) {
      if (*size < 0 || static_cast<std::uint64_t>(*size) > rest_.size()) return false;
      const auto bytes = static_cast<std::size_t>(*size);
      if (!add_raw(rest_.first(bytes), one, request_)) return false;
      rest_ = rest_.subspan(bytes);
    }
    request_.inputs.push_back(one);
    return true;
  }

  bool data(InferRequest::Input& one) {
    switch (one.type) {
      case WireType::kInts: {
        one.begin = request_.ints.size();
        const bool fine = list([&] { return whole(request_.ints.emplace_back()); });
        return fine && request_.ints.size() - one.begin == one.rows;
      }
      case WireType::kFloats: {
        one.begin = request_.floats.size();
        const bool fine = list([&] { return number(request_.floats.emplace_back()); });
        return fine && request_.floats.size() - one.begin == one.rows;
      }
      case WireType::kTexts: {
        one.begin = request_.texts.size();
        const bool fine = list([&] { return add_text(); });
        return fine && request_.texts.size() - one.begin == one.rows && one.rows <= kMostTexts;
      }
    }
    return false;
  }

  // A number as Python's `json` and numpy read it: as a double first.
  bool number(float& found) {
    std::string_view digits;
    bool is_whole = false;
    double value = 0;
    if (!scanner_.number(digits, is_whole)) return false;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || std::abs(value) > std::numeric_limits<float>::max()) return false;
    found = is_whole && value == 0 ? 0.0f : static_cast<float>(value);  // "-0" is a whole number
    return true;
  }

  bool add_text() {
    std::string_view last;
    std::string* changed = nullptr;
    int parts = 0;
    if (!scanner_.text([&](std::string_view part) {
          if (++parts == 2) changed = &request_.unescaped.emplace_back(last);
          if (changed != nullptr) *changed += part;
          last = part;
        }))
      return false;
    request_.texts.push_back(changed == nullptr ? last : std::string_view(*changed));
    return true;
  }

  JsonScanner scanner_;
  std::span<const std::byte> rest_;
  InferRequest& request_;
};

}  // namespace

bool read_grpc_request(std::span<const std::byte> message, InferRequest& request) {
  try {
    return read_message(message, request);
  } catch (const BadMessage&) {
    return false;
  }
}

bool read_http_request(std::span<const std::byte> body, std::size_t head, InferRequest& request) {
  if (head > body.size()) return false;
  return HeadReader(as_text(body.first(head)), body.subspan(head), request).read();
}

RequestPlan::RequestPlan(std::vector<Input> inputs, std::vector<IdFeature> ids,
                         std::vector<std::size_t> floats)
    : inputs_(std::move(inputs)), ids_(std::move(ids)), floats_(std::move(floats)) {
  for (std::size_t i = 0; i < inputs_.size(); ++i)
    if (!places_.emplace(inputs_[i].name, i).second)
      throw std::invalid_argument("a request has two inputs of the name " + inputs_[i].name);
  bool fits = true;
  for (const IdFeature& feature : ids_) fits = fits && feature.input < inputs_.size();
  for (const std::size_t input : floats_)
    fits = fits && input < inputs_.size() && inputs_[input].type == WireType::kFloats;
  if (!fits) throw std::invalid_argument("a feature reads an input that is not there, or of another type");
}

std::optional<std::variant<PackedRows, PackedRanking>> RequestPlan::pack(const InferRequest& request) const {
  if (request.inputs.size() != inputs_.size() || inputs_.empty()) return std::nullopt;
  std::size_t most = 1;
  bool has_one = false;
  Given given(inputs_.size());
  for (const InferRequest::Input& input : request.inputs) {
    const auto place = places_.find(input.name);
    if (place == places_.end() || given[place->second] != nullptr) return std::nullopt;
    const Input& wanted = inputs_[place->second];
    if (input.type != wanted.type || (!input.is_flat && !wanted.is_flat)) return std::nullopt;
    if (input.rows == 1) {
      has_one = true;
    } else if (most != 1 && input.rows != most) {
      return std::nullopt;
    } else {
      most = input.rows;
    }
    given[place->second] = &input;
  }
  if (most == 1 || !has_one) {
    std::optional<PackedRows> packed = pack_side(request, given, most);
    if (!packed) return std::nullopt;
    return std::move(*packed);
  }
  std::optional<PackedRows> shared = pack_side(request, given, 1);
  std::optional<PackedRows> items = pack_side(request, given, most);
  if (!shared || !items) return std::nullopt;
  PackedRanking ranking;
  for (const InferRequest::Input* const input : given) ranking.own += static_cast<char>(input->rows != 1);
  for (const IdFeature& feature : ids_) ranking.own_ids.push_back(given[feature.input]->rows != 1);
  for (const std::size_t place : floats_) ranking.own_floats.push_back(given[place]->rows != 1);
  ranking.shared = std::move(*shared);
  ranking.items = std::move(*items);
  ranking.counts = {static_cast<std::int64_t>(most)};
  return ranking;
}

std::optional<PackedRows> RequestPlan::pack_side(const InferRequest& request, const Given& given,
                                                 std::size_t rows) const {
  PackedRows packed;
  packed.rows = rows;
  std::vector<std::int64_t> one_each(rows + 1);
  std::iota(one_each.begin(), one_each.end(), 0);
  PackedIds ids;
  ids.ids.reserve(ids_.size() * rows);
  ids.splits.reserve(ids_.size() * rows + 1);
  ids.splits.push_back(0);
  for (const IdFeature& feature : ids_) {
    const InferRequest::Input& input = *given[feature.input];
    if (input.rows != rows) continue;
    ++packed.id_features;
    RawIds raw{feature.kind, {}, {}, {}, one_each, feature.boundaries, feature.separator, feature.id};
    if (input.type == WireType::kTexts) {
      if (!add_text_ids(raw, std::span(request.texts).subspan(input.begin, rows), ids)) return std::nullopt;
      continue;
    }
    if (input.type == WireType::kInts)
      raw.ints = std::span(request.ints).subspan(input.begin, rows);
    else
      raw.floats = std::span(request.floats).subspan(input.begin, rows);
    if (!add_ids(raw, ids)) return std::nullopt;
  }
  packed.ids = std::move(ids.ids);
  packed.splits = std::move(ids.splits);
  packed.floats.reserve(floats_.size() * rows);
  for (const std::size_t place : floats_) {
    if (given[place]->rows != rows) continue;
    ++packed.float_features;
    const auto values = std::span(request.floats).subspan(given[place]->begin, rows);
    bool fine = true;
    for (const float value : values) fine &= std::isfinite(value);
    if (!fine) return std::nullopt;
    packed.floats.insert(packed.floats.end(), values.begin(), values.end());
  }
  return packed;
}

PackedRows PackedRows::part(std::size_t begin, std::size_t end) const {
  if (begin > end || end > rows) throw std::invalid_argument("part: there are fewer rows");
  PackedRows found{end - begin, id_features, float_features, {}, {0}, {}};
  for (std::size_t feature = 0; feature < id_features; ++feature) {
    const std::int64_t* const cells = splits.data() + feature * rows;
    const auto before = static_cast<std::int64_t>(found.ids.size()) - cells[begin];
    found.ids.insert(found.ids.end(), ids.begin() + cells[begin], ids.begin() + cells[end]);
    for (std::size_t row = begin; row < end; ++row) found.splits.push_back(cells[row + 1] + before);
  }
  for (std::size_t feature = 0; feature < float_features; ++feature) {
    const float* const values = floats.data() + feature * rows;
    found.floats.insert(found.floats.end(), values + begin, values + end);
  }
  return found;
}

PackedRows PackedRows::joined(std::span<const PackedRows* const> parts) {
  if (parts.empty()) throw std::invalid_argument("joined: there must be rows");
  PackedRows found{0, parts[0]->id_features, parts[0]->float_features, {}, {0}, {}};
  for (const PackedRows* const part : parts) {
    if (part->id_features != found.id_features || part->float_features != found.float_features)
      throw std::invalid_argument("joined: rows were packed by different plans");
    found.rows += part->rows;
  }
  for (std::size_t feature = 0; feature < found.id_features; ++feature)
    for (const PackedRows* const part : parts) {
      const std::int64_t* const cells = part->splits.data() + feature * part->rows;
      const auto before = static_cast<std::int64_t>(found.ids.size()) - cells[0];
      found.ids.insert(found.ids.end(), part->ids.begin() + cells[0], part->ids.begin() + cells[part->rows]);
      for (std::size_t row = 0; row < part->rows; ++row) found.splits.push_back(cells[row + 1] + before);
    }
  for (std::size_t feature = 0; feature < found.float_features; ++feature)
    for (const PackedRows* const part : parts) {
      const float* const values = part->floats.data() + feature * part->rows;
      found.floats.insert(found.floats.end(), values, values + part->rows);
    }
  return found;
}

PackedRanking PackedRanking::part(std::size_t begin, std::size_t end) const {
  if (counts.size() != 1) throw std::invalid_argument("part: there must be one user");
  PackedRanking found{own, own_ids, own_floats, shared, items.part(begin, end), {}};
  found.counts = {static_cast<std::int64_t>(end - begin)};
  return found;
}

PackedRanking PackedRanking::joined(std::span<const PackedRanking* const> parts) {
  if (parts.empty()) throw std::invalid_argument("joined: there must be users");
  std::vector<const PackedRows*> shared, items;
  PackedRanking found{parts[0]->own, parts[0]->own_ids, parts[0]->own_floats, {}, {}, {}};
  for (const PackedRanking* const part : parts) {
    if (part->own != found.own) throw std::invalid_argument("joined: requests have other inputs of users");
    shared.push_back(&part->shared);
    items.push_back(&part->items);
    found.counts.insert(found.counts.end(), part->counts.begin(), part->counts.end());
  }
  found.shared = PackedRows::joined(shared);
  found.items = PackedRows::joined(items);
  return found;
}

std::optional<PackedRows> PackedRanking::full(std::size_t most) const {
  PackedRows found{items.rows, own_ids.size(), own_floats.size(), {}, {0}, {}};
  std::size_t of_shared = 0, of_items = 0;
  for (const bool is_own : own_ids) {
    const PackedRows& side = is_own ? items : shared;
    const std::int64_t* const cells = side.splits.data() + (is_own ? of_items : of_shared)++ * side.rows;
    for (std::size_t row = 0; row < side.rows; ++row) {
      const std::span<const std::int64_t> cell(side.ids.data() + cells[row],
                                               side.ids.data() + cells[row + 1]);
      for (std::int64_t left = is_own ? 1 : counts[row]; left > 0; --left) {
        if (found.ids.size() + cell.size() > most) return std::nullopt;
        found.ids.insert(found.ids.end(), cell.begin(), cell.end());
        found.splits.push_back(static_cast<std::int64_t>(found.ids.size()));
      }
    }
  }
  if (items.rows * own_floats.size() > most) return std::nullopt;
  of_shared = of_items = 0;
  for (const bool is_own : own_floats) {
    const PackedRows& side = is_own ? items : shared;
    const float* const values = side.floats.data() + (is_own ? of_items : of_shared)++ * side.rows;
    for (std::size_t row = 0; row < side.rows; ++row)
      found.floats.insert(found.floats.end(), is_own ? 1 : static_cast<std::size_t>(counts[row]),
                          values[row]);
  }
  return found;
}

}  // namespace monolith
