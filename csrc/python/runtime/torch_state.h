// The parts of the calling thread's torch state that decide whether the engine copies.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <pybind11/pybind11.h>

namespace tdcopier {

// Returns whether a torch mode (function or dispatch) or transform is active. Then every leaf is
// delegated to its own `.to`. GIL: held.
bool is_mode_active();

// Returns whether start_copy() to `target` would be accepted, and its plain leaves moved by the
// engine: the target is the host or a device of the engine, no torch mode is active, and no stream
// is capturing. GIL: held.
bool engine_takes(c10::Device target);

// Returns whether this process has initialised the devices of this type. A torch that is built for
// CUDA may run on a machine without a GPU or a driver, where any call of CUDA's fails. Where there
// is one, the first call takes 0.3 s and 0.5 GB, and no forked child can use CUDA after it. So this
// asks torch, and never the device. False in a child of a process that had. GIL: held.
bool is_in_use(c10::DeviceType type);

}  // namespace tdcopier
