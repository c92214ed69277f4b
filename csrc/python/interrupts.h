// Waits that give up the GIL and that Ctrl-C ends.
#pragma once

#include <pybind11/pybind11.h>

#include "base/patience.h"

namespace tdcopier {

// At import, with the GIL: signals are handled by Python's main thread only.
void note_main_thread();

// While it lives, the thread has no GIL, and its waits ask Python for signals every 20 ms. What a
// handler raises ends the wait with Interrupted.
class WaitWithoutGil {
 public:
  WaitWithoutGil();

 private:
  const pybind11::gil_scoped_release no_gil_;
  const InterruptibleWaits waits_;
};

bool was_interrupted();
// Raises what a signal's handler has raised during a wait of this thread. GIL: held.
void raise_if_interrupted();

}  // namespace tdcopier
