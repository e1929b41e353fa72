// Python face of infer_request.h: keeps buffers alive, releases the GIL, adds no behaviour.
#include "infer_request.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

// A request with the buffer that it was read from.
struct WireRequest {
  nb::bytes buffer;
  InferRequest read;
  nb::str model, version, id;
  nb::list outputs;  // (name, whether it is wanted raw, or None)
};

std::span<const std::byte> span_of(const nb::bytes& buffer) {
  return {reinterpret_cast<const std::byte*>(buffer.c_str()), buffer.size()};
}

// Nothing for bytes that are no UTF-8: protobuf would refuse them.
std::optional<nb::str> decoded(const std::string& text) {
  PyObject* const made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
  if (made == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return nb::steal<nb::str>(made);
}

// A request below is read sooner than another thread could take and give back the interpreter.
constexpr std::size_t kLargeBytes = 16 << 10;

template <class Read>
nb::object read_with(nb::bytes buffer, Read&& read) {
  InferRequest request;
  bool fine = false;
  {
    std::optional<GilReleased> unlocked;
    if (buffer.size() >= kLargeBytes) unlocked.emplace();
    fine = read(span_of(buffer), request);
  }
  if (!fine) return nb::none();
  const auto model = decoded(request.model), version = decoded(request.version), id = decoded(request.id);
  if (!model || !version || !id) return nb::none();
  nb::list outputs;
  for (const InferRequest::Output& one : request.outputs) {
    const auto name = decoded(one.name);
    if (!name) return nb::none();
    outputs.append(nb::make_tuple(*name, one.binary));
  }
  return nb::cast(WireRequest{std::move(buffer), std::move(request), *model, *version, *id, outputs});
}

using InputTuple = std::tuple<std::string, WireType, bool>;
using IdTuple = std::tuple<std::size_t, RawIds::Kind, std::vector<double>, std::optional<char>,
                           std::optional<std::uint32_t>>;

void make_plan(RequestPlan* self, const std::vector<InputTuple>& inputs, const std::vector<IdTuple>& ids,
               std::vector<std::size_t> floats) {
  std::vector<RequestPlan::Input> wanted;
  for (const auto& [name, type, is_flat] : inputs) wanted.push_back({name, type, is_flat});
  std::vector<RequestPlan::IdFeature> features;
  for (const auto& [input, kind, boundaries, separator, slot] : ids)
    features.push_back({input, kind, boundaries, separator, {slot}});
  new (self) RequestPlan(std::move(wanted), std::move(features), std::move(floats));
}

std::optional<std::variant<PackedRows, PackedRanking>> pack(const RequestPlan& plan,
                                                            const WireRequest& request) {
  std::optional<GilReleased> unlocked;
  if (request.buffer.size() >= kLargeBytes) unlocked.emplace();
  return plan.pack(request.read);
}

PackedRows join_rows(const std::vector<const PackedRows*>& parts) {
  GilReleased unlocked;
  return PackedRows::joined(parts);
}

PackedRanking join_rankings(const std::vector<const PackedRanking*>& parts) {
  GilReleased unlocked;
  return PackedRanking::joined(parts);
}

std::optional<PackedRows> full_rows(const PackedRanking& ranking, std::size_t most) {
  GilReleased unlocked;
  return ranking.full(most);
}

// A view of what some rows own, which keeps them alive. Not const, because torch takes no other; no code
// writes.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> view(nb::handle rows, const std::vector<T>& column) {
  return {const_cast<T*>(column.data()), {column.size()}, rows};
}

}  // namespace

void bind_infer_request(nb::module_& m) {
  nb::enum_<WireType>(m, "WireType", "What an input of a request holds.")
      .value("TEXTS", WireType::kTexts)
      .value("INTS", WireType::kInts)
      .value("FLOATS", WireType::kFloats);
  nb::class_<WireRequest>(m, "WireRequest", "A request of the Open Inference Protocol, read in its buffer.")
      .def_ro("model", &WireRequest::model, nb::sig("def model(self) -> str"))
      .def_ro("version", &WireRequest::version, nb::sig("def version(self) -> str"))
      .def_ro("id", &WireRequest::id, nb::sig("def id(self) -> str"))
      .def_ro("outputs", &WireRequest::outputs, nb::sig("def outputs(self) -> list[tuple[str, bool | None]]"),
              "Names of the wanted outputs, and whether each is wanted raw.")
      .def_prop_ro(
          "binary_outputs", [](const WireRequest& self) { return self.read.binary_outputs; },
          "Whether outputs are wanted raw if they do not say so themselves.")
      .def_prop_ro(
          "typed", [](const WireRequest& self) { return self.read.typed; },
          "Whether a gRPC message has its values outside of raw contents.");
  nb::class_<PackedRows>(m, "PackedRows", "The features of some rows, as a batch has them. Never changes.")
      .def_ro("rows", &PackedRows::rows)
      .def_prop_ro(
          "ids", [](nb::handle self) { return view(self, nb::cast<const PackedRows&>(self).ids); },
          nb::sig("def ids(self) -> NDArray[numpy.int64]"), "Of all features, cell after cell.")
      .def_prop_ro(
          "splits", [](nb::handle self) { return view(self, nb::cast<const PackedRows&>(self).splits); },
          nb::sig("def splits(self) -> NDArray[numpy.int64]"), "Where each cell begins, then the end.")
      .def_prop_ro(
          "floats", [](nb::handle self) { return view(self, nb::cast<const PackedRows&>(self).floats); },
          nb::sig("def floats(self) -> NDArray[numpy.float32]"), "Feature after feature.")
      .def("part", &PackedRows::part, "begin"_a, "end"_a, "Some of the rows.");
  nb::class_<PackedRanking>(
      m, "PackedRanking", "Ranking requests: the features of users, and of the items of each. Never changes.")
      .def_prop_ro(
          "own", [](const PackedRanking& self) { return nb::bytes(self.own.data(), self.own.size()); },
          "By input of the plan: 1 if it has a row per item, 0 if it has one per user.")
      .def_ro("shared", &PackedRanking::shared, "The features of users, a row each.")
      .def_ro("items", &PackedRanking::items, "The other features, a row per item.")
      .def_prop_ro(
          "counts", [](nb::handle self) { return view(self, nb::cast<const PackedRanking&>(self).counts); },
          nb::sig("def counts(self) -> NDArray[numpy.int64]"), "Items of each user.")
      .def("part", &PackedRanking::part, "begin"_a, "end"_a, "Some of the items of the only user.")
      .def("full", &full_rows, "most"_a,
           "A row per item with all features; None if it has more than `most` ids or numbers.");
  nb::class_<RequestPlan>(m, "RequestPlan", "How the inputs of a model become its features. Thread-safe.")
      .def("__init__", &make_plan, "inputs"_a, "ids"_a, "floats"_a,
           "Inputs are (name, type, whether of one dimension); ids are (number of the input, kind, "
           "boundaries, separator, slot); floats are numbers of inputs.")
      .def("pack", &pack, "request"_a,
           "The features of a request; None if it does not have exactly the inputs of the model, or a value "
           "cannot be read.");
  m.def("join_rows", &join_rows, "parts"_a, "Rows that one plan has packed, one after another.");
  m.def("join_rankings", &join_rankings, "parts"_a, "The same of ranking requests with equal `own`.");
  m.def(
      "read_grpc_request",
      [](nb::bytes message) {
        return read_with(std::move(message), [](std::span<const std::byte> bytes, InferRequest& request) {
          return read_grpc_request(bytes, request);
        });
      },
      "message"_a, nb::sig("def read_grpc_request(message: bytes) -> WireRequest | None"),
      "A ModelInferRequest; None if it is malformed or unusual, and must be read in another way.");
  m.def(
      "read_http_request",
      [](nb::bytes body, std::size_t head) {
        return read_with(std::move(body), [head](std::span<const std::byte> bytes, InferRequest& request) {
          return read_http_request(bytes, head, request);
        });
      },
      "body"_a, "head"_a, nb::sig("def read_http_request(body: bytes, head: int) -> WireRequest | None"),
      "The body of a request, whose first `head` bytes are JSON; None as above.");
}

}  // namespace monolith
