// The one walk that takes a nested structure apart: a treespec, and the leaves by device.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/leaf.h"
#include "engine/mapped_leaves.h"
#include "python/sources.h"
#include "python/tree.h"

namespace tdcopier {

// Leaves of one device that the engine moves.
struct SourceGroup {
  LeafTable leaves;
  std::shared_ptr<PySources> sources;  // keeps their memory
  MappedLeaves mapped;                 // none on a device

  // The leaf that was added last lies in a mapped file.
  void note_mapped() { mapped.note(leaves.reach(leaves[leaves.size() - 1])); }
};

// A leaf that is left to `Tensor.to`.
struct Delegated {
  size_t value;  // its index among the spec's ready values, to be replaced
  size_t node;   // for its path
};

struct FlatTree {
  TreeSpec spec;
  std::vector<SourceGroup> groups;
  std::vector<Delegated> delegated;
  uint32_t reused = 0;
  uint32_t opaque = 0;
};

// GIL: held; classes other than list, tuple and dict are asked in Python how to take them apart.
// Throws: RecursionError; TypeError and ValueError with the leaf's path; what such a class raises.
FlatTree flatten(pybind11::handle data, c10::Device target);

class RowLeaves;

// The same where every leaf is a table: the tree has their rows instead. Throws IndexError too.
FlatTree flatten_tables(pybind11::handle data, c10::Device target, RowLeaves& rows);

// How node `node` of the spec of flatten(data, target) is reached, such as "data['boxes'][3]".
// Walks again: for messages. Empty if a container's own code does not work a second time.
std::optional<std::string> path_of(pybind11::handle data, size_t node, c10::Device target);
// Of every node. Throws as flatten().
std::vector<std::string> paths_of(pybind11::handle data, c10::Device target);

// Exactly a dict, and each value exactly a tensor of torch's own class.
bool is_dict_of_tensors(pybind11::handle object);

// A list of (path, leaf) for every tensor and array of the tree, in the order of the walk; a
// collection that is left to its own `.to` counts as one.
pybind11::list leaves_with_paths(pybind11::handle data, c10::Device target);

}  // namespace tdcopier
