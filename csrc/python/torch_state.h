// The calling thread's state of torch, as far as it decides who copies.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

namespace tdcopier {

// Is a torch mode (function, dispatch) or transform active? Then every leaf is left to its `.to`.
// GIL: held.
bool torch_is_altered();

// Would start_copy() to `target` be let through, and its plain leaves moved by the engine: a device
// of the engine's or the host, no mode active, no capture in the way? GIL: held.
bool engine_takes(c10::Device target);

}  // namespace tdcopier
