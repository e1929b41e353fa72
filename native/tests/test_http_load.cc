#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "http_load.h"

namespace {

using namespace monolith;

const std::string kRequest = "POST /infer HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc";

// A server on a port of its own: a thread for each connection, which reads whole requests of one length.
class Server {
 public:
  // What is sent for the n-th request of all connections, in pieces; nothing closes the connection.
  using Answer = std::function<std::vector<std::string>(std::uint64_t)>;

  Server(std::size_t request_bytes, int connections, Answer answer)
      : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    CHECK_EQUAL(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    CHECK_EQUAL(listen(listener_, 64), 0);
    CHECK_EQUAL(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    for (int i = 0; i < connections; ++i)
      threads_.emplace_back([this, request_bytes, answer] { serve(request_bytes, answer); });
  }

  ~Server() {
    shutdown(listener_, SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
    close(listener_);
  }

  std::uint16_t port() const { return port_; }
  std::uint64_t requests() const { return requests_; }
  bool was_asked_otherwise() const { return asked_otherwise_; }

 private:
  void serve(std::size_t request_bytes, const Answer& answer) {
    const int connection = accept(listener_, nullptr, nullptr);
    if (connection < 0) return;
    std::string request(request_bytes, '\0');
    while (true) {
      std::size_t got = 0;
      for (ssize_t count = 1; got < request_bytes && count > 0; got += static_cast<std::size_t>(count)) {
        count = recv(connection, request.data() + got, request_bytes - got, 0);
        if (count < 0) count = 0;
      }
      if (got < request_bytes) break;
      if (!request.starts_with("POST /infer") || !request.ends_with("abc")) asked_otherwise_ = true;
      const std::vector<std::string> pieces = answer(requests_++);
      if (pieces.empty()) break;
      for (const std::string& piece : pieces) {
        send(connection, piece.data(), piece.size(), MSG_NOSIGNAL);
        if (pieces.size() > 1) std::this_thread::yield();  // so that some are read one by one
      }
    }
    close(connection);
  }

  const int listener_;
  std::uint16_t port_ = 0;
  std::atomic<std::uint64_t> requests_ = 0;
  std::atomic<bool> asked_otherwise_ = false;
  std::vector<std::thread> threads_;
};

std::string answer(const std::string& status, const std::string& body) {
  return "HTTP/1.1 " + status + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

HttpLoadSeen load(const Server& server, int connections, const std::string& request = kRequest) {
  return load_http({"127.0.0.1", server.port(), request, connections, 0.05, 10});
}

void requests_of_all_connections_are_counted_by_their_status() {
  const std::string good = answer("200 OK", "12345"), bad = answer("429 Too Many Requests", "");
  const Server server(kRequest.size(), 8,
                      [&](std::uint64_t n) { return std::vector{n % 3 == 2 ? bad : good}; });
  const HttpLoadSeen seen = load(server, 8);
  const std::uint64_t all = server.requests();
  CHECK(all >= 8);
  CHECK_EQUAL(seen.answers.at(429), all / 3);
  CHECK_EQUAL(seen.answers.at(200), all - all / 3);
  CHECK_EQUAL(seen.bytes, seen.answers.at(200) * good.size() + seen.answers.at(429) * bad.size());
  CHECK_EQUAL(seen.latencies.count(), all);
  CHECK_EQUAL(seen.closed, 0u);
  CHECK(!server.was_asked_otherwise());
  CHECK(seen.seconds >= 0.05);
  CHECK(seen.processor_seconds > 0);
  CHECK(seen.latencies.quantile(0.5) <= seen.latencies.quantile(0.99));
}

void answers_may_come_in_pieces_and_requests_may_be_large() {
  const std::string request = kRequest.substr(0, 11) + std::string(6 << 20, 'x') + "abc";
  const std::string body(300'000, 'y');
  const std::vector<std::string> pieces{"HTT", "P/1.1 200 OK\r\ncontent-length:300000\r\n\r", "\n",
                                        body.substr(0, 1), body.substr(1)};
  const Server server(request.size(), 2, [&](std::uint64_t) { return pieces; });
  const HttpLoadSeen seen = load(server, 2, request);
  CHECK(seen.answers.at(200) >= 2);
  CHECK_EQUAL(seen.answers.at(200), server.requests());
  CHECK(!server.was_asked_otherwise());
}

void a_closed_connection_is_counted_and_the_others_continue() {
  const Server server(kRequest.size(), 3, [&](std::uint64_t n) {
    return n == 5 ? std::vector<std::string>() : std::vector{answer("200 OK", "")};
  });
  const HttpLoadSeen seen = load(server, 3);
  CHECK_EQUAL(seen.closed, 1u);
  CHECK_EQUAL(seen.answers.at(200), server.requests() - 1);
}

void what_is_no_answer_with_a_length_is_refused() {
  const std::vector<std::pair<std::string, const char*>> cases{
      {"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "no content-length"},
      {"HTTP/1.1 200 OK\r\nx-content-length: 0\r\n\r\n", "no content-length"},
      {"HTTP/1.1 200 OK\r\ncontent-length: 1x\r\n\r\n.", "no content-length"},
      {"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", "not HTTP/1.1"},
      {"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n..", "longer than its content-length"},
      {std::string(70'000, '.'), "does not end"},
  };
  for (const auto& [said, why] : cases) {
    const Server server(kRequest.size(), 1, [&said](std::uint64_t) { return std::vector{said}; });
    CHECK_THROWS(std::runtime_error, why, load(server, 1));
  }
}

void a_server_that_does_not_answer_is_not_waited_for_long() {
  const Server server(kRequest.size() + 1, 1, [](std::uint64_t) { return std::vector<std::string>(); });
  CHECK_THROWS(std::runtime_error, "1 connections have no answer",
               load_http({"127.0.0.1", server.port(), kRequest, 1, 0.01, 0.01}));
  CHECK_THROWS(std::invalid_argument, "needs a request", load_http({"127.0.0.1", server.port(), {}, 1}));
}

void quantiles_are_within_a_hundredth() {
  LatencyHistogram histogram;
  CHECK_EQUAL(histogram.quantile(0.5), std::numeric_limits<double>::infinity());
  for (std::uint64_t n = 1; n <= 100'000; ++n) histogram.add(n * 1000);
  for (const double share : {0.0001, 0.5, 0.99, 1.0}) {
    const double exact = share * 0.1;
    CHECK(histogram.quantile(share) >= exact * (1 - 1e-9));
    CHECK(histogram.quantile(share) <= exact * 1.008);
  }
  LatencyHistogram ends;
  ends.add(0);
  CHECK_EQUAL(ends.quantile(1), 0.0);
  ends.add(UINT64_MAX);
  CHECK(std::isfinite(ends.quantile(1)));
}

}  // namespace

int main() {
  return monolith::check::run({
      {"requests of all connections are counted by their status",
       requests_of_all_connections_are_counted_by_their_status},
      {"answers may come in pieces, and requests may be large",
       answers_may_come_in_pieces_and_requests_may_be_large},
      {"a closed connection is counted, and the others continue",
       a_closed_connection_is_counted_and_the_others_continue},
      {"what is no answer with a length is refused", what_is_no_answer_with_a_length_is_refused},
      {"a server that does not answer is not waited for long",
       a_server_that_does_not_answer_is_not_waited_for_long},
      {"quantiles are within a hundredth", quantiles_are_within_a_hundredth},
  });
}
