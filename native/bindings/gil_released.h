// GilReleased: lets other Python threads run while a call works, as nb::gil_scoped_release does.
//
// A thread that comes back when the interpreter is ending gets no lock any more: Python ends it by
// pthread_exit, which unwinds its stack. Out of a destructor, and through nanobind's own frames, that may not
// go: the whole process would be aborted, at the end of a program that did nothing wrong but have a daemon
// thread in a lookup. Such a thread stays where it is instead, as from Python 3.14 on, until the process is
// gone a moment later.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace monolith {

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  ~GilReleased() {
#if defined(__GLIBCXX__)
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }

 private:
  PyThreadState* state_;
};

}  // namespace monolith
