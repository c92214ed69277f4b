// Stores the exception of a signal handler until it can be raised to the caller with the GIL held.
// After Ctrl-C the copy goes on: CopyJob::help() gives the waiting thread's place to a worker.
// docs/concepts/rules.md says what Ctrl-C does to each call.
#include "python/runtime/interrupts.h"

#include <pythread.h>
#include <unistd.h>

#include <atomic>
#include <utility>

namespace py = pybind11;

namespace tdcopier {
namespace {

std::atomic<unsigned long> g_main_thread = 0;

struct Raised {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};
thread_local Raised t_raised;

bool look_for_signals() {
  const bool raised = PyErr_CheckSignals() != 0;
  if (raised) {
    const Raised before = t_raised;
    PyErr_Fetch(&t_raised.type, &t_raised.value, &t_raised.traceback);
    Py_XDECREF(before.type);
    Py_XDECREF(before.value);
    Py_XDECREF(before.traceback);
  }
  return raised;
}

void check_signals() {
  const PyGILState_STATE gil = PyGILState_Ensure();
  const bool raised = look_for_signals();
  PyGILState_Release(gil);
  if (raised) throw Interrupted();
}

}  // namespace

void note_main_thread() {
  const py::object main = py::module_::import("threading").attr("main_thread")();
  g_main_thread = main.attr("ident").cast<unsigned long>();
}

bool is_main_thread() {
  return PyThread_get_thread_ident() == g_main_thread;
}

WithoutGil::~WithoutGil() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // Python ends the thread by unwinding its stack
    for (;;) pause();
  }
}

WaitWithoutGil::WaitWithoutGil() : waits_(is_main_thread() ? check_signals : nullptr) {}

bool run_signal_handlers() {
  return look_for_signals() || t_raised.type != nullptr;
}

void raise_if_interrupted() {
  if (t_raised.type == nullptr) return;
  const Raised raised = std::exchange(t_raised, {});
  PyErr_Restore(raised.type, raised.value, raised.traceback);
  throw py::error_already_set();
}

}  // namespace tdcopier
