// Flattens a nested structure in one walk, into a treespec and the leaves by device.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/device/pinned_ranges.h"
#include "engine/leaves/leaf.h"
#include "engine/leaves/mapped_leaves.h"
#include "python/walk/sources.h"
#include "python/walk/tree.h"
#include "python/walk/value_kind.h"

namespace tdcopier {

// Leaves of one device that the engine moves.
struct SourceGroup {
  LeafTable leaves;
  std::shared_ptr<PySources> sources;  // keeps the memory of the leaves alive
  MappedLeaves mapped;                 // empty for leaves on a device
  // Set if the leaves are rows of pinned tables, which the target reads itself.
  std::optional<PinnedTables> in_place{};
  // Set if the leaves are those of one parcel: its plan, with default options.
  std::shared_ptr<const PackPlan> plan{};
  size_t leaves_of_plan = 0;  // while leaves are added

  // Marks the leaf added last as memory-mapped.
  void note_mapped() { mapped.note(leaves.reach(leaves[leaves.size() - 1])); }
};

// A leaf that is delegated to `Tensor.to`, or an object that has a `.to` of its own.
struct Delegated {
  size_t value;  // its index among the spec's ready values, to be replaced
  size_t node;   // for its path
  WhyDelegated why;
  Packable packable = Packable::kYes;  // for kNotPlain
};

struct FlatTree {
  TreeSpec spec;
  std::vector<SourceGroup> groups;
  std::vector<Delegated> delegated;
  uint32_t reused = 0;
  uint32_t opaque = 0;

  // Takes over a reference. Sets the leaf's `value`.
  void delegate(PyObject* object, Delegated leaf) {
    leaf.value = spec.set_ready(leaf.node, object);
    delegated.push_back(leaf);
  }
};

// Flattens `data`. GIL: held; containers other than list, tuple and dict are flattened by Python
// code.
// Throws: RecursionError; TypeError and ValueError with the leaf's path; any error of that code.
FlatTree flatten(pybind11::handle data, c10::Device target);

// Like flatten(), but leaves are moved from any device, the target's too. For pack().
FlatTree flatten_for_parcel(pybind11::handle data);

class RowLeaves;

// Like flatten(), but every leaf is a table, and the result has the selected rows of each table in
// its place. Throws IndexError too.
FlatTree flatten_tables(pybind11::handle data, c10::Device target, RowLeaves& rows);

// Returns the path of a node of the spec of flatten(data, target), for example "data['boxes'][3]";
// without a target, of flatten_for_parcel(data). Repeats the walk, so only for messages. Returns
// nullopt if a container's own code raises in this walk.
std::optional<std::string> path_of(pybind11::handle data, size_t node,
                                   std::optional<c10::Device> target);

// A tree for messages.
struct NamedTree {
  std::vector<std::string> paths;  // by node of the spec of flatten(data, target)
  FlatTree tree;                   // has the same nodes; every leaf is a ready value: the source
};
// Throws as flatten().
NamedTree flatten_with_paths(pybind11::handle data, c10::Device target);

// Returns whether the object is a dict whose values are all tensors, subclasses excluded for both.
bool is_dict_of_tensors(pybind11::handle object);

// Returns a list of (path, leaf) for every tensor and array of the tree, in the order of the walk.
// A collection or an object that is delegated to its own `.to` counts as one leaf.
pybind11::list leaves_with_paths(pybind11::handle data, c10::Device target);

// Like leaves_with_paths(), for what flatten_tables() finds: tables, and the results of
// `rows.read()` in the places of others.
pybind11::list tables_with_paths(pybind11::handle storage, c10::Device target, RowLeaves& rows);

}  // namespace tdcopier
