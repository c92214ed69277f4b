// Python bindings of the test controls: faults, paces, poison, detections and schedules.
#pragma once

#include <pybind11/pybind11.h>

namespace tdcopier::sim {

void bind_controls(pybind11::module_& m);
void bind_detect(pybind11::module_& m);
void bind_schedule(pybind11::module_& m);

}  // namespace tdcopier::sim
