// Walks two nested structures side by side, and pairs each leaf with its destination.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// A leaf and its destination.
struct LeafPair {
  PyObject* source;       // owned by PairedTrees
  PyObject* destination;  // owned by PairedTrees
};

struct PairedTrees {
  PairedTrees() = default;
  PairedTrees(PairedTrees&& other) noexcept = default;
  ~PairedTrees();
  RecycledVector<LeafPair> leaves;  // in the order of the walk
  uint32_t opaque = 0;
  uint32_t opaque_differences = 0;  // pairs of opaque values of which one would change the other
  pybind11::object opaque_pairs{};  // null unless listed: see tdcopier._opaque.Pair
};

// The names of the two trees in error messages.
struct PairNames {
  const char* source = "source";
  const char* destination = "destination";
};

// Pairs the leaves of two trees whose containers have the same children: the same keys, the same
// attributes, or the same number of children by index. GIL: held; Python code flattens containers
// other than list, tuple, dict, and TensorDicts that have only tensors in both trees.
// Throws: ValueError, with the path, where the trees differ; RecursionError; TypeError for values
// that start_copy() refuses too; any error of that code.
// `list_opaque`: also list the pairs of opaque values.
PairedTrees pair_trees(pybind11::handle source, pybind11::handle destination, PairNames names,
                       bool list_opaque);

// Returns the path of a pair of leaves, for example "['boxes'][3]". Repeats the walk, so only for
// messages. Returns nullopt if a container's own code raises in this walk.
std::optional<std::string> path_of_pair(pybind11::handle source, pybind11::handle destination,
                                        size_t pair);

// Returns a list of (path, leaf, destination) for every pair, in the order of the walk.
// `lists_objects`: also an object with a `.to` of its own that both trees refer to.
pybind11::list pairs_with_paths(pybind11::handle source, pybind11::handle destination,
                                PairNames names = {}, bool lists_objects = false);

}  // namespace tdcopier
