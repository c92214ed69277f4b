// Sorts pairs of leaves and destinations: those that the engine copies, by devices, and those that
// are delegated to torch. Throws for pairs that cannot be copied: nothing is converted or
// broadcast.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/overlap.h"
#include "base/recycled.h"
#include "python/walk/delegated_outputs.h"
#include "python/walk/delegated_pairs.h"
#include "python/walk/into_group.h"
#include "python/walk/pair_walk.h"
#include "python/walk/row_leaves.h"

namespace tdcopier {

// Memory that no table has: of a leaf whose destination is the same memory, or of a delegated leaf.
struct OtherArea {
  c10::Device device;
  Area area;
  size_t number;  // in the walk
};

struct SortedPairs {
  std::vector<IntoGroup> groups;
  std::vector<DelegatedPair> delegated;
  RecycledVector<c10::TensorImpl*> written;  // tensors to bump; kept alive by `kept`
  RecycledVector<pybind11::object> kept;
  std::vector<OtherArea> others;
  uint32_t reused = 0;
  LeafDevices readers;  // of delegated leaves, as `writers`
  LeafDevices writers;
  uint32_t empty = 0;
  uint32_t opaque = 0;
  uint32_t opaque_differences = 0;
  pybind11::object opaque_pairs{};  // null unless listed: see PairedTrees
};

// Pairs and sorts the leaves of two trees. `list_opaque`: as for pair_trees(). GIL: held.
// Throws: as pair_trees(); ValueError, with the path, for a destination that cannot be written or
// does not fit; RuntimeError, as torch does, for a destination made in inference mode if the call
// is outside of it; IndexError if a row is out of range.
SortedPairs sort_pairs(pybind11::handle source, pybind11::handle destination, PairNames names,
                       TablesOfPairs tables, bool list_opaque);

}  // namespace tdcopier
