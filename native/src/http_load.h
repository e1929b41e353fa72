// load_http: as many requests as a server answers, over HTTP/1.1, for benchmarks.
//
// A client in Python takes up to a tenth of the processor time that it measures. This one has one thread,
// which waits for all connections by epoll. Each connection sends the same bytes, reads the answer, and sends
// them again at once. It is no general client: an answer has a head and a body with a content-length, or it
// is an error.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

namespace monolith {

// Counts durations in nanoseconds. Each power of two has 128 buckets, so a quantile is at most 0.8 % too
// high.
class LatencyHistogram {
 public:
  void add(std::uint64_t nanoseconds);
  std::uint64_t count() const { return count_; }

  // The duration in seconds that a share of all, 0 to 1, are not above; of none, infinity.
  double quantile(double share) const;

 private:
  static constexpr int kBits = 7;

  std::array<std::uint64_t, std::size_t{64 - kBits + 1} << kBits> counts_{};
  std::uint64_t count_ = 0;
};

// A test of a server under load: what is asked, and for how long.
struct HttpLoad {
  std::string host;
  std::uint16_t port = 0;
  std::span<const char> request;  // head and body, as they are sent
  int connections = 1;            // with one request in flight on each
  double seconds = 1;             // after that, no new request is sent
  double patience = 60;           // seconds for the last answers after that
};

// What the connections saw. A request in flight at the end is waited for, and counts.
struct HttpLoadSeen {
  std::map<int, std::uint64_t> answers;  // status -> how many
  std::uint64_t bytes = 0;               // of the answers, heads included
  std::uint64_t closed = 0;              // connections that the server closed with a request in flight
  double seconds = 0;                    // from the first request to the last answer
  double processor_seconds = 0;          // of the calling thread meanwhile
  LatencyHistogram latencies;            // from the first byte sent to the last one read
};

// Throws std::invalid_argument for a load that makes no sense, and std::runtime_error if the server cannot be
// reached, answers otherwise than above, or not within the patience.
HttpLoadSeen load_http(const HttpLoad& load);

}  // namespace monolith
