// The only call of Python by the simulation's core.
#include "sim/python_lock.h"

#include <torch/csrc/python_headers.h>

namespace tdcopier::sim {

bool has_python_lock() noexcept {
  return PyGILState_Check() == 1;
}

}  // namespace tdcopier::sim
