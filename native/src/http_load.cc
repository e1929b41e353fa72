#include "http_load.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <ctime>
#endif

namespace monolith {

void LatencyHistogram::add(std::uint64_t nanoseconds) {
  // The highest kBits + 1 bits name the bucket; shorter numbers have one of their own.
  const int shift = std::max(static_cast<int>(std::bit_width(nanoseconds)) - kBits - 1, 0);
  ++counts_[(static_cast<std::size_t>(shift) << kBits) + (nanoseconds >> shift)];
  ++count_;
}

double LatencyHistogram::quantile(double share) const {
  if (count_ == 0) return std::numeric_limits<double>::infinity();
  const double wanted = std::ceil(std::clamp(share, 0.0, 1.0) * static_cast<double>(count_));
  const auto rank = std::max<std::uint64_t>(static_cast<std::uint64_t>(wanted), 1);
  std::uint64_t seen = 0;
  for (std::size_t at = 0; at < counts_.size(); ++at) {
    seen += counts_[at];
    if (seen < rank) continue;
    // The inverse of `add`: the largest duration of the bucket.
    const auto shift = std::max<std::size_t>(at >> kBits, 1) - 1;
    const std::uint64_t first = (at - (shift << kBits)) << shift;
    return static_cast<double>(first + (std::uint64_t{1} << shift) - 1) * 1e-9;
  }
  return std::numeric_limits<double>::infinity();
}

#if defined(__linux__)

namespace {

constexpr std::size_t kLongestHead = 64 << 10;

[[noreturn]] void fail(const std::string& what, int error = 0) {
  throw std::runtime_error("load over HTTP: " + what +
                           (error != 0 ? std::string(": ") + std::strerror(error) : ""));
}

std::uint64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

// A file descriptor that is closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }

  int number() const { return number_; }

 private:
  int number_;
};

Descriptor connect_to(const addrinfo& address) {
  Descriptor made(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (made.number() < 0) fail("cannot open a socket", errno);
  while (connect(made.number(), address.ai_addr, address.ai_addrlen) != 0)
    if (errno != EINTR) fail("cannot connect", errno);
  const int on = 1;
  setsockopt(made.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return made;
}

// The value of a header, without blanks around it; nothing if the head has no such header.
std::string_view header(std::string_view head, std::string_view name) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  for (std::size_t at = head.find("\r\n"); at != std::string_view::npos; at = head.find("\r\n", at)) {
    at += 2;
    const std::string_view line = head.substr(at, head.find("\r\n", at) - at);
    if (line.size() <= name.size() || line[name.size()] != ':') continue;
    if (!std::equal(name.begin(), name.end(), line.begin(), same)) continue;
    const std::size_t first = line.find_first_not_of(" \t", name.size() + 1);
    if (first == std::string_view::npos) return {};
    return line.substr(first, line.find_last_not_of(" \t") - first + 1);
  }
  return {};
}

template <class Number>
bool read_number(std::string_view text, Number* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

struct AnswerHead {
  int status = 0;
  std::uint64_t body = 0;  // bytes
};

AnswerHead read_head(std::string_view head) {
  AnswerHead found;
  const auto shown = [&] { return std::string(head.substr(0, std::min<std::size_t>(head.size(), 300))); };
  if (!head.starts_with("HTTP/1.1 ") || head.size() < 12 || !read_number(head.substr(9, 3), &found.status))
    fail("the answer is not HTTP/1.1: " + shown());
  if (!read_number(header(head, "content-length"), &found.body) || !header(head, "transfer-encoding").empty())
    fail("the answer has no content-length, and this client reads no other: " + shown());
  return found;
}

// All connections of a load, and what they saw.
class HttpClient {
 public:
  explicit HttpClient(const HttpLoad& load) : load_(load), poll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (poll_.number() < 0) fail("cannot open epoll", errno);
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = getaddrinfo(load.host.c_str(), std::to_string(load.port).c_str(), &hints, &found))
      fail("cannot resolve " + load.host + ": " + gai_strerror(error));
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
    callers_.resize(static_cast<std::size_t>(load.connections));
    for (Caller& caller : callers_) {
      caller.socket = connect_to(*found);
      epoll_event event{};
      // By edge: an event tells of a change once, and nothing has to be registered again for each request.
      event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
      event.data.ptr = &caller;
      if (epoll_ctl(poll_.number(), EPOLL_CTL_ADD, caller.socket.number(), &event) != 0)
        fail("cannot wait for a connection", errno);
    }
  }

  HttpLoadSeen run() {
    const std::uint64_t begun = nanoseconds(CLOCK_MONOTONIC), used = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    end_ = begun + static_cast<std::uint64_t>(load_.seconds * 1e9);
    const std::uint64_t last = end_ + static_cast<std::uint64_t>(load_.patience * 1e9);
    open_ = callers_.size();
    for (Caller& caller : callers_) ask(caller);
    std::vector<epoll_event> events(callers_.size());
    while (open_ > 0) {
      const std::uint64_t now = nanoseconds(CLOCK_MONOTONIC);
      if (now >= last)
        fail(std::to_string(open_) + " connections have no answer " + std::to_string(load_.patience) +
             " s after the last request; is the server alive?");
      const auto wait = static_cast<int>(std::min<std::uint64_t>((last - now) / 1'000'000 + 1, 60'000));
      const int count = epoll_wait(poll_.number(), events.data(), static_cast<int>(events.size()), wait);
      if (count < 0 && errno != EINTR) fail("cannot wait for answers", errno);
      for (int i = 0; i < count; ++i) {
        Caller& caller = *static_cast<Caller*>(events[i].data.ptr);
        if (caller.is_asking && !send_rest(caller)) continue;
        read_answers(caller, (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
      }
    }
    seen_.seconds = static_cast<double>(nanoseconds(CLOCK_MONOTONIC) - begun) * 1e-9;
    seen_.processor_seconds = static_cast<double>(nanoseconds(CLOCK_THREAD_CPUTIME_ID) - used) * 1e-9;
    return std::move(seen_);
  }

 private:
  // One connection. It asks until the end, unless the server closes it.
  struct Caller {
    Descriptor socket;
    bool is_asking = false;       // a request is in flight
    std::uint64_t begun = 0;      // when its first byte was sent
    std::size_t sent = 0;         // bytes of it
    std::string head;             // of the answer, until it is whole
    bool in_body = false;         // whether it is
    std::uint64_t body_left = 0;  // bytes
    int status = 0;
  };

  void ask(Caller& caller) {
    caller.is_asking = true;
    caller.begun = nanoseconds(CLOCK_MONOTONIC);
    caller.sent = 0;
    send_rest(caller);
  }

  // Sends what the socket takes; false if the connection is gone.
  bool send_rest(Caller& caller) {
    while (caller.sent < load_.request.size()) {
      const ssize_t count = send(caller.socket.number(), load_.request.data() + caller.sent,
                                 load_.request.size() - caller.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count >= 0) {
        caller.sent += static_cast<std::size_t>(count);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return true;
      } else if (errno == EPIPE || errno == ECONNRESET) {
        finish(caller);
        return false;
      } else if (errno != EINTR) {
        fail("cannot send a request", errno);
      }
    }
    return true;
  }

  // Reads all that has come; asks again after a whole answer.
  void read_answers(Caller& caller, bool to_the_end) {
    while (caller.socket.number() >= 0) {
      const ssize_t count = recv(caller.socket.number(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (count == 0 || (count < 0 && errno == ECONNRESET)) {
        finish(caller);
      } else if (count > 0) {
        take(caller, std::string_view(buffer_.data(), static_cast<std::size_t>(count)));
        // Less than there was room for: the rest is another event, unless it is the end, which came with
        // this.
        if (static_cast<std::size_t>(count) < buffer_.size() && !to_the_end) return;
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      } else if (errno != EINTR) {
        fail("cannot read an answer", errno);
      }
    }
  }

  void take(Caller& caller, std::string_view data) {
    if (!caller.is_asking) fail("the server sent more than it was asked for");
    seen_.bytes += data.size();
    if (!caller.in_body) {
      const std::size_t before = caller.head.size();
      caller.head += data;
      const std::size_t end = caller.head.find("\r\n\r\n", before - std::min<std::size_t>(before, 3));
      if (end == std::string::npos) {
        if (caller.head.size() > kLongestHead) fail("the head of an answer does not end");
        return;
      }
      const AnswerHead head = read_head(std::string_view(caller.head).substr(0, end + 2));
      caller.in_body = true;
      caller.status = head.status;
      caller.body_left = head.body;
      data.remove_prefix(end + 4 - before);
    }
    if (data.size() > caller.body_left) fail("the body of an answer is longer than its content-length");
    caller.body_left -= data.size();
    if (caller.body_left > 0) return;
    const std::uint64_t now = nanoseconds(CLOCK_MONOTONIC);
    if (caller.sent < load_.request.size()) fail("the server answered before it had the whole request");
    seen_.latencies.add(now - caller.begun);
    ++seen_.answers[caller.status];
    caller.in_body = caller.is_asking = false;
    caller.head.clear();
    if (now < end_)
      ask(caller);
    else
      finish(caller);
  }

  void finish(Caller& caller) {
    seen_.closed += caller.is_asking;
    caller.socket = Descriptor();  // which also takes it out of epoll
    caller.is_asking = false;
    --open_;
  }

  const HttpLoad& load_;
  const Descriptor poll_;
  std::vector<Caller> callers_;
  std::array<char, 64 << 10> buffer_;
  std::uint64_t end_ = 0;  // nothing is asked from then on
  std::size_t open_ = 0;   // connections
  HttpLoadSeen seen_;
};

}  // namespace

HttpLoadSeen load_http(const HttpLoad& load) {
  if (load.connections < 1 || load.request.empty() || !(load.seconds >= 0) || !(load.patience >= 0))
    throw std::invalid_argument(
        "load over HTTP: needs a request, a connection at least, and no negative time");
  return std::make_unique<HttpClient>(load)->run();
}

#else

HttpLoadSeen load_http(const HttpLoad&) {
  throw std::runtime_error("load over HTTP: needs Linux, since it waits by epoll");
}

#endif

}  // namespace monolith
