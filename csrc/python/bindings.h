// The parts of the native module whose bindings have a file of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace tdcopier {

// Binds pinned memory, leases of it, and the memory of storages that are parked.
void bind_memory(pybind11::module_& m);
// Binds parcels.
void bind_parcels(pybind11::module_& m);
// Binds the connections of channels.
void bind_channels(pybind11::module_& m);
// Binds slabs.
void bind_slabs(pybind11::module_& m);
// Binds the submodule `testing`.
void bind_testing(pybind11::module_& m);

}  // namespace tdcopier
