// The pairs of leaves that are delegated to torch, and why some of them are refused.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "python/walk/row_leaves.h"

namespace tdcopier {

// A pair that is delegated to torch.
struct DelegatedPair {
  pybind11::object source;
  pybind11::object destination;
  size_t number;  // in the walk
};

// Returns the path of one end of a pair, for messages.
using PathOfEnd = std::function<std::string(size_t number, bool written)>;

// Refuses pairs that torch would convert or broadcast, and rows that it cannot move: mismatch() in
// tdcopier/_into.py says why. GIL: held. May run any Python code. Throws: ValueError, with the
// path.
void check_delegated_pairs(const std::vector<DelegatedPair>& pairs, TablesOfPairs tables,
                           const PathOfEnd& path);

}  // namespace tdcopier
