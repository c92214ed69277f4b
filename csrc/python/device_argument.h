// Turns what the caller gave as a device or a stream into c10's, with errors that say what to do.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace tdcopier {

// A str, torch.device or int, as for `Tensor.to`. The result has an index where the backend has
// devices ("cuda" is the current one), exists, and its backend is initialised.
// Throws: TypeError, ValueError (no such device); what the backend's initialisation raises.
c10::Device parse_device(pybind11::handle device);

// Does the engine move leaves to this device itself? Others (CPU, meta, ...) are left to
// `Tensor.to`.
bool has_engine_transfers(c10::Device device);

// None (the calling thread's current stream of `device`) or a torch.Stream of `device`.
// Throws: TypeError, ValueError.
c10::Stream parse_stream(pybind11::handle stream, c10::Device device);

// Of a torch.Stream; nullopt for anything else.
std::optional<c10::Device> device_of_stream(pybind11::handle stream);

// TypeError unless it is None or a torch.Stream, of whatever device.
void check_is_stream(pybind11::handle stream, c10::Device device);

// RuntimeError if `stream` is capturing a graph: a copy is not work that a graph can replay.
void refuse_capture(const c10::Stream& stream, const char* call);

}  // namespace tdcopier
