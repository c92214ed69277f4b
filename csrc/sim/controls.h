// Bindings of what a test can order: faults, the time of transfers, poison.
#pragma once

#include <pybind11/pybind11.h>

namespace tdcopier::sim {

void bind_controls(pybind11::module_& m);

}  // namespace tdcopier::sim
