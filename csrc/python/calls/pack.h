// Packs a nested batch into a parcel.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "python/walk/parcel.h"

namespace tdcopier {

// Packs the leaves of a tree on the host, and its structure, into new memory. `pickle(values)`
// returns the bytes of what only pickle can write. GIL: held; released while bytes are copied.
// Throws: TypeError, with the path of a leaf that cannot be packed; what flatten() throws.
std::unique_ptr<Parcel> pack(pybind11::handle data, pybind11::handle pickle,
                             pybind11::handle unpickle);

}  // namespace tdcopier
