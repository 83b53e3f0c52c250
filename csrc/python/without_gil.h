// Work that other Python threads need not wait for.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace gradpack {

// Calls work() with the GIL released. pybind11's gil_scoped_release takes it back in a destructor; a daemon thread that
// does so while the interpreter ends is unwound by Python (before 3.14), and a destructor that is unwound ends the process
// with SIGABRT. Such a thread stops here instead, as Python 3.14 has it, and dies with the process.
template <typename Work>
void without_gil(Work&& work) {
  PyThreadState* const state = PyEval_SaveThread();
  const auto take_back = [&] {
    try {
      PyEval_RestoreThread(state);
    } catch (...) {  // the unwinding, which is all that can come out of C and has no object that a handler could name
      while (true) pause();
    }
  };
  try {
    work();
  } catch (...) {
    take_back();
    throw;
  }
  take_back();
}

}  // namespace gradpack
