// The walk over two nested structures at once: which leaf goes where.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// A leaf and where it goes.
struct LeafPair {
  PyObject* source;       // owned by the walk's result
  PyObject* destination;  // as well
};

struct PairedTrees {
  PairedTrees() = default;
  PairedTrees(PairedTrees&& other) noexcept = default;
  ~PairedTrees();
  RecycledVector<LeafPair> leaves;  // in the order of the walk
  uint32_t opaque = 0;
};

// What the caller calls the two trees.
struct PairNames {
  const char* source = "source";
  const char* destination = "destination";
};

// Pairs the leaves of two trees whose containers have the same children: reached by the same keys,
// by the same attributes, or by index and as many. GIL: held; classes other than list, tuple and
// dict are asked in Python how to take them apart.
// Throws: ValueError, with the path, where the trees differ; RecursionError; TypeError for what
// neither a copy can take; what such a class raises.
PairedTrees pair_trees(pybind11::handle source, pybind11::handle destination, PairNames names = {});

// How the leaves of a pair are reached, such as "['boxes'][3]". Walks again: for messages. Empty if
// a container's own code does not work a second time.
std::optional<std::string> path_of_pair(pybind11::handle source, pybind11::handle destination,
                                        size_t pair);

// A list of (steps to it, leaf, destination) for every pair of the trees, in the order of the walk.
pybind11::list pairs_with_paths(pybind11::handle source, pybind11::handle destination);

}  // namespace tdcopier
