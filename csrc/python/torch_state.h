// The parts of the calling thread's torch state that decide whether the engine copies.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

namespace tdcopier {

// Returns whether a torch mode (function or dispatch) or transform is active. Then every leaf is
// delegated to its own `.to`. GIL: held.
bool is_mode_active();

// Returns whether start_copy() to `target` would be accepted, and its plain leaves moved by the
// engine: the target is the host or a device of the engine, no torch mode is active, and no stream
// is capturing. GIL: held.
bool engine_takes(c10::Device target);

}  // namespace tdcopier
