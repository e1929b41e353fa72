// A request of the Open Inference Protocol, read where it lies: a gRPC message, or the body of HTTP.
//
// It reads the requests that clients send all day (one value per row, of int64, float32 or texts, raw, typed
// or in JSON) and is sure of them. Any other request is *odd*: malformed, with parameters, of other types or
// shapes, or only unusual. An odd request is not judged here: the caller reads it in another way, which finds
// what is wrong with it. So an error never depends on who has read a request.
//
// Texts stay in the buffer of the request, and are hashed there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "cells.h"

namespace monolith {

enum class WireType : std::uint8_t { kTexts, kInts, kFloats };

// The buffer that was read must outlive it.
struct InferRequest {
  struct Input {
    std::string_view name;
    WireType type = WireType::kInts;
    std::size_t begin = 0, rows = 0;  // of `texts`, `ints` or `floats`
    bool is_flat = true;              // of one dimension, not (rows, 1)
  };
  struct Output {
    std::string name;
    std::optional<bool> binary;  // whether it is wanted raw, over HTTP
  };

  std::string model, version, id;  // of gRPC, where they are part of the message; an id may be of both
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  bool binary_outputs = false;  // of HTTP: those that do not say so themselves
  bool typed = false;           // whether a gRPC message has its values outside of raw contents
  std::vector<std::string_view> texts;
  std::vector<std::int64_t> ints;
  std::vector<float> floats;
  std::deque<std::string> names, unescaped;  // what is not as it lies in the buffer
};

// Both return false for an odd request, whose fields mean nothing then.
bool read_grpc_request(std::span<const std::byte> message, InferRequest& request);
// `head` bytes are JSON, and the rest is raw tensors.
bool read_http_request(std::span<const std::byte> body, std::size_t head, InferRequest& request);

// The features of some rows, as a batch has them: the ids of all features, cell after cell, and the numbers
// of each float feature, one after the other.
struct PackedRows {
  std::size_t rows = 0, id_features = 0, float_features = 0;
  std::vector<std::int64_t> ids, splits;
  std::vector<float> floats;

  PackedRows part(std::size_t begin, std::size_t end) const;
  // The rows of several, which were packed by one plan, one after another.
  static PackedRows joined(std::span<const PackedRows* const> parts);
};

// Ranking requests: the features of users, one row each, and those of the items of each user. A feature is a
// user's if its input has one row while others have more.
//
//     user [ann]  age [31]  item [7 8 9]     own 0 0 1, shared: 1 row of user and age, items: 3 rows of item
struct PackedRanking {
  std::string own;                        // by input of the plan: 1 if it has a row per item, otherwise 0
  std::vector<bool> own_ids, own_floats;  // the same by feature
  PackedRows shared, items;               // features of either side, in the order of the plan
  std::vector<std::int64_t> counts;       // items of each user

  // Some of the items of the only user.
  PackedRanking part(std::size_t begin, std::size_t end) const;
  // Several, which were packed by one plan and have the same inputs of users, one after another.
  static PackedRanking joined(std::span<const PackedRanking* const> parts);
  // A row per item with all features; nothing if it has more than `most` ids or numbers.
  std::optional<PackedRows> full(std::size_t most) const;
};

// How the inputs of one model become its features. Immutable.
class RequestPlan {
 public:
  struct Input {
    std::string name;
    WireType type;
    bool is_flat;  // whether the model reads one dimension, as which (rows, 1) counts, too
  };
  using Kind = std::optional<RawIds::Kind>;
  struct IdFeature {
    std::size_t input;
    RawIds::Kind kind;
    std::vector<double> boundaries;
    std::optional<char> separator;
    IdKind id;
  };

  // Throws std::invalid_argument for a name twice, or a feature of no input.
  RequestPlan(std::vector<Input> inputs, std::vector<IdFeature> ids, std::vector<std::size_t> floats);

  // Nothing unless the request has exactly the inputs of the model, of as many rows each or of one row next
  // to others of more, and every value can be read.
  std::optional<std::variant<PackedRows, PackedRanking>> pack(const InferRequest& request) const;

 private:
  using Given = std::vector<const InferRequest::Input*>;  // by number of the input

  // The features whose inputs have so many rows.
  std::optional<PackedRows> pack_side(const InferRequest& request, const Given& given,
                                      std::size_t rows) const;

  const std::vector<Input> inputs_;
  const std::vector<IdFeature> ids_;
  const std::vector<std::size_t> floats_;
  std::unordered_map<std::string_view, std::size_t> places_;  // of inputs_, which own the names
};

}  // namespace monolith
