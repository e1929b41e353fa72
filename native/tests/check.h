// The whole of our C++ test framework: named cases, checks that print where
// they failed, an exit status that tells.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace monolith::check {

using Case = std::pair<std::string_view, std::function<void()>>;

inline int failures = 0;

inline void fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::cout << file << ":" << line << ": " << what << std::endl;
}

template <class A, class B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  if constexpr (requires { std::cout << a << b; })
    std::cout << "  left:  " << a << "\n  right: " << b << "\n";
  fail(file, line, text);
}

// Runs the cases in order; what main() returns.
inline int run(const std::vector<Case>& cases) {
  for (const auto& [name, body] : cases) {
    const int before = failures;
    try {
      body();
    } catch (const std::exception& error) {
      fail(name.data(), 0, std::string("stray exception: ") + error.what());
    }
    std::cout << (failures == before ? "ok    " : "FAILED ") << name << std::endl;
  }
  std::cout << cases.size() << " cases, " << failures << " failures" << std::endl;
  return failures == 0 ? 0 : 1;
}

}  // namespace monolith::check

// Neither is used from two threads at once: gather in the threads, check after joining.
#define CHECK(condition) \
  ((condition) ? void() : ::monolith::check::fail(__FILE__, __LINE__, "not so: " #condition))
#define CHECK_EQUAL(a, b) ::monolith::check::equal(__FILE__, __LINE__, #a " == " #b, (a), (b))

// Expects `statement` to throw `Error` with `text` in its message.
#define CHECK_THROWS(Error, text, statement)                                                \
  do {                                                                                      \
    bool thrown = false;                                                                    \
    try {                                                                                   \
      statement;                                                                            \
    } catch (const Error& error) {                                                          \
      thrown = true;                                                                        \
      if (std::string_view(error.what()).find(text) == std::string_view::npos)              \
        ::monolith::check::fail(__FILE__, __LINE__, std::string("says: ") + error.what());  \
    }                                                                                       \
    if (!thrown) ::monolith::check::fail(__FILE__, __LINE__, "did not throw: " #statement); \
  } while (false)
