// Python face of monolith::load_http: releases the GIL, adds no behaviour.
#include "http_load.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace monolith {
namespace {

HttpLoadSeen load(std::string host, std::uint16_t port, const nb::bytes& request, int connections,
                  double seconds, double patience) {
  const HttpLoad asked{std::move(host), port,    std::span(request.c_str(), request.size()),
                       connections,     seconds, patience};
  GilReleased unlocked;
  return load_http(asked);
}

}  // namespace

void bind_http_load(nb::module_& m) {
  nb::class_<HttpLoadSeen>(m, "HttpLoadSeen", "What the connections of `load_http` saw.")
      .def_ro("answers", &HttpLoadSeen::answers, "Status -> number of answers.")
      .def_ro("bytes", &HttpLoadSeen::bytes, "Bytes of the answers, heads included.")
      .def_ro("closed", &HttpLoadSeen::closed, "Connections that the server closed with a request in flight.")
      .def_ro("seconds", &HttpLoadSeen::seconds, "From the first request to the last answer.")
      .def_ro("processor_seconds", &HttpLoadSeen::processor_seconds, "Of the calling thread meanwhile.")
      .def(
          "quantile", [](const HttpLoadSeen& seen, double share) { return seen.latencies.quantile(share); },
          "share"_a,
          "Return the seconds within which a share of the requests, 0 to 1, was answered; at most 0.8 % too "
          "many. Without an answer, infinity.");

  m.def("load_http", &load, "host"_a, "port"_a, "request"_a, "connections"_a, "seconds"_a,
        "patience"_a = 60.0,
        "Send the same bytes over so many connections, again as soon as they are answered, for so many "
        "seconds. Answers must be HTTP/1.1 with a content-length.");
}

}  // namespace monolith
