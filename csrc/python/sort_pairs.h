// Sorts pairs of leaves and destinations: those that the engine copies, by devices, and those that
// are delegated to torch. Throws for pairs that cannot be copied: nothing is converted or
// broadcast; mismatch() in tdcopier/_into.py says why another shape or dtype is refused.
#pragma once

#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "base/overlap.h"
#include "engine/device/pinned_ranges.h"
#include "engine/leaves/destination.h"
#include "engine/leaves/mapped_leaves.h"
#include "python/delegated_outputs.h"
#include "python/pair_walk.h"
#include "python/row_leaves.h"
#include "python/sources.h"

namespace tdcopier {

// The leaves that go from one device to one other, or stay on it.
struct IntoGroup {
  c10::Device destination;
  LeafPairs pairs;
  std::shared_ptr<PySources> sources = std::make_shared<PySources>();  // both are keep-alives
  std::shared_ptr<PySources> destinations = std::make_shared<PySources>();
  RecycledVector<uint32_t> numbers{};  // by leaf: number of its pair in the walk
  MappedLeaves mapped{};               // among the sources
  // Set if one end of each pair is rows of a pinned table, which the other end's device moves.
  std::optional<PinnedTables> in_place{};

  // Marks the source added last as memory-mapped. Requires: it is not rows.
  void note_mapped() { mapped.note(pairs.leaves.reach(pairs.leaves[pairs.leaves.size() - 1])); }
};

// A pair that is delegated to torch.
struct DelegatedPair {
  pybind11::object source;
  pybind11::object destination;
  size_t number;  // in the walk
};

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

// Which end of each pair is a table, of which rows are selected.
struct TablesOfPairs {
  RowLeaves* rows = nullptr;  // null: neither
  bool are_sources = false;
};

// Pairs and sorts the leaves of two trees. `list_opaque`: as for pair_trees(). GIL: held.
// Throws: as pair_trees(); ValueError, with the path, for a destination that cannot be written or
// does not fit; RuntimeError, as torch does, for a destination made in inference mode if the call
// is outside of it; IndexError if a row is out of range.
SortedPairs sort_pairs(pybind11::handle source, pybind11::handle destination, PairNames names,
                       TablesOfPairs tables, bool list_opaque);

}  // namespace tdcopier
