// The layout of a parcel: a tree without the bytes of its leaves, and where each leaf is in the
// parcel's body. Written as bytes, and read from bytes of any origin.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_format.h"
#include "base/pack_plan.h"
#include "engine/leaves/leaf.h"
#include "python/walk/tree.h"

namespace tdcopier {

// A place in the spec for a value that was pickled.
struct PickledPlace {
  // kEntry: what a TensorDict can hold, which its `.to` moves by the `.to` of each.
  enum class Needs : uint8_t { kNothing, kClass, kDict, kEntry };
  bool is_key;  // of the spec's keys; else of its values
  Needs needs;
  size_t place;
  size_t value;  // its index among the pickled values
};

// GIL: held for every member, including the destructor.
class ParcelLayout {
 public:
  TreeSpec spec;  // all leaves are of group 0; None in the places of pickled values
  // On the host, by index, without addresses: the tree's, and then `memory`.
  LeafTable leaves{c10::Device(c10::kCPU)};
  // Where they are in the body: the image of this plan, which follows from the leaves alone. So
  // bytes of any origin name no address, and no two leaves share bytes.
  std::shared_ptr<const PackPlan> plan;
  pybind11::object pickled = pybind11::none();  // bytes; None if nothing had to be pickled
  std::vector<PickledPlace> places{};
  uint32_t memory = 0;       // number of leaves that are memory of the tensors in pickled values
  uint32_t opaque = 0;       // number of values that are no leaves
  pybind11::list classes{};  // of rebuilt containers: (module, name, class)

  // What a parcel's address must be a multiple of: torch's code for 16-byte elements, which memory
  // of pickled values may have too, needs that much.
  uint64_t address_bytes = 16;

  // The same plan for a body that a device can read. Made by the first call.
  const std::shared_ptr<const PackPlan>& pinned_plan() const;

  // Returns where the first pickled value is, or the container that it belongs to: for example
  // "data['boxes'][3]".
  std::string path_of_pickled() const;

  size_t tree_leaves() const { return leaves.size() - memory; }
  uint64_t body_bytes() const { return plan->chunks.empty() ? 0 : plan->chunks.back().end(); }

 private:
  mutable std::shared_ptr<const PackPlan> pinned_plan_{};
};

// Returns the object that the TensorDicts of all layouts have as their device: a torch.device of
// the host. A tree that goes elsewhere has another one in its place.
pybind11::handle parcel_device();

// Returns the object that pack() gives the code of collections as their target: another one. In a
// pickle it means the device where it is read, which other devices do not.
pybind11::handle packing_device();

// Returns the plan of all parcels with these leaves.
PackPlan parcel_plan(const LeafTable& leaves);

// Returns whether leaves of the dtype can be packed.
bool can_be_packed(c10::ScalarType dtype);

// The nodes of a tree, and the values that only pickle can write.
struct WrittenTree {
  ByteWriter bytes;
  pybind11::list values;
  std::vector<size_t> nodes;  // by value: the node that it belongs to
};

// Writes a tree whose leaves are all in `leaves`. Requires: their dtypes can be packed. Runs Python
// code for custom containers.
WrittenTree write_tree(const TreeSpec& spec, const LeafTable& leaves);

// Writes the layout. `memory`: leaves that hold the memory of the tensors in pickled values.
void write_layout(const WrittenTree& tree, std::string_view pickled, std::span<const Leaf> memory,
                  ByteWriter& to);

// Reads a layout, and unpickles nothing; one that was read not long ago is returned again.
// `most_bytes`: of all leaves. `may_import`: modules of classes that are not imported yet.
// Throws: MalformedBytes; ValueError for a class that cannot be had.
std::shared_ptr<const ParcelLayout> read_layout(std::span<const std::byte> bytes,
                                                uint64_t most_bytes, bool may_import);

}  // namespace tdcopier
