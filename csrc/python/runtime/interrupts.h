// Waits that release the GIL and that Ctrl-C can interrupt. The copy goes on: CopyJob::help() gives
// the place of an interrupted thread to a worker. copy_into.cpp ends its copy first.
#pragma once

#include <pybind11/pybind11.h>

#include "base/polling_wait.h"

namespace tdcopier {

// Remembers Python's main thread, the only one that handles signals. Call at import. GIL: held.
void note_main_thread();
// Returns whether the calling thread is that one.
bool is_main_thread();

// Scope in which the thread releases the GIL. A thread that wants it back while Python ends never
// returns, as from Python 3.14 on. Earlier versions end such a thread, and unwinding its C++ code
// would abort the process. GIL: held.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Such a scope for waits: in the main thread, they check for signals every 20 ms, and throw
// Interrupted if a signal handler raises.
class WaitWithoutGil {
 public:
  WaitWithoutGil();

 private:
  const WithoutGil no_gil_;
  const InterruptibleWaits waits_;
};

// Runs the handlers of pending signals now, in the main thread. Returns whether one raised, now or
// during a wait of this thread. GIL: held.
bool run_signal_handlers();
// Raises the exception that a signal handler raised during a wait of this thread. GIL: held.
void raise_if_interrupted();

}  // namespace tdcopier
