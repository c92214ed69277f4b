// Packs a nested batch into a parcel, and reads one.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "python/walk/parcel.h"

namespace tdcopier {

// Packs the leaves of a tree, which are all on one device, and its structure, into memory there.
// `out`: None for new memory; else it is called with the number of bytes and the device, and
// returns an object with a writable buffer, or for a device a uint8 tensor there, whose first bytes
// become the parcel; or None. GIL: held; released while bytes are copied. Throws: TypeError, with
// the path of a value that cannot be packed; ValueError if `out` is too small or overlaps the tree;
// what flatten() throws.
std::unique_ptr<Parcel> pack(pybind11::handle data, pybind11::handle out);

// A parcel whose leaves are not written yet, with the address of each leaf of the tree and the
// offset in the parcel's bytes where it is to be written. Leaves without bytes have no place.
struct Reserved {
  std::unique_ptr<Parcel> parcel;
  std::vector<std::pair<uintptr_t, uint64_t>> places;
};

// As pack(), without the leaves. Does nothing for a tree on a device: the parcel is null.
Reserved reserve(pybind11::handle data, pybind11::handle out);

// Reads a parcel from an object with a buffer, whose memory it keeps, or from a uint8 tensor on a
// device. Bytes that are not aligned are copied. `is_owned`: no one else has the object, so even
// the memory of a `bytes` may be written. `head`: of a parcel on a device, its first bytes, if they
// are known on the host: then the host does not wait for the device. Throws: TypeError for other
// objects; MalformedBytes.
std::unique_ptr<Parcel> parcel_from(pybind11::handle bytes, bool may_unpickle, bool is_mapped,
                                    bool is_owned, std::string_view head);

}  // namespace tdcopier
