// Converts the caller's device and stream arguments to c10 types.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace tdcopier {

// Parses a str, torch.device or int, as `Tensor.to` does. The result exists, its backend is
// initialised, and it has an index where the backend has several devices ("cuda" is the current
// one).
// Throws: TypeError; ValueError (no such device); any error of the backend's initialisation.
c10::Device parse_device(pybind11::handle device);

// Returns whether the engine itself moves leaves to and from this device. Leaves for other devices
// (for example meta) are delegated to `Tensor.to`.
bool has_engine_transfers(c10::Device device);

// Parses a torch.Stream of `device`; None is the calling thread's current stream there.
// Throws: TypeError, ValueError.
c10::Stream parse_stream(pybind11::handle stream, c10::Device device);

// Returns the device of a torch.Stream; nullopt for any other object.
std::optional<c10::Device> device_of_stream(pybind11::handle stream);

// Throws TypeError unless `stream` is None or a torch.Stream of any device.
void check_is_stream(pybind11::handle stream, c10::Device device);

}  // namespace tdcopier
