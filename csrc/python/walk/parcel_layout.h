// The layout of a parcel: a tree without the bytes of its leaves, and where each leaf is in the
// parcel's body. Written as bytes, and read from bytes of any origin.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/byte_format.h"
#include "base/pack_plan.h"
#include "engine/leaves/leaf.h"
#include "python/walk/tree.h"

namespace tdcopier {

// GIL: held for every member, including the destructor.
struct ParcelLayout {
  TreeSpec spec;     // all leaves are of group 0
  LeafTable leaves;  // on the host, by index, without addresses
  // Where they are in the body: the image of this plan, which follows from the leaves alone. So
  // bytes of any origin name no address, and no two leaves share bytes.
  std::shared_ptr<const PackPlan> plan;
  pybind11::object pickled;  // bytes; None if nothing had to be pickled
  uint32_t opaque = 0;       // number of values that are no leaves

  uint64_t body_bytes() const { return plan->chunks.empty() ? 0 : plan->chunks.back().end(); }
};

// Returns the object that the TensorDicts of all layouts have as their device: a torch.device of
// the host. A tree that goes elsewhere has another one in its place.
pybind11::handle parcel_device();

// Returns the plan of all parcels with these leaves.
std::shared_ptr<const PackPlan> parcel_plan(const LeafTable& leaves);

// Returns whether leaves of the dtype can be packed.
bool can_be_packed(c10::ScalarType dtype);

// Writes a tree whose leaves are all in `leaves`. Values that only pickle can write are pickled, by
// `pickle(list)`, which returns bytes. Requires: their dtypes can be packed. Throws: what that
// raises.
void write_layout(const TreeSpec& spec, const LeafTable& leaves, pybind11::handle pickle,
                  ByteWriter& to);

// Reads a layout. One that was read not long ago is returned again if nothing in it was pickled.
// `unpickle(bytes)` returns the list; None if no pickle may be read. `most_bytes`: of all leaves.
// Throws: MalformedBytes; what `unpickle` raises.
std::shared_ptr<const ParcelLayout> read_layout(std::span<const std::byte> bytes,
                                                pybind11::handle unpickle, uint64_t most_bytes);

}  // namespace tdcopier
