// Looks at every leaf and where it goes: what the engine copies, by devices; what is left to torch;
// what is a mistake.
#pragma once

#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "base/overlap.h"
#include "engine/destination.h"
#include "engine/mapped_leaves.h"
#include "python/delegated.h"
#include "python/pair_walk.h"
#include "python/sources.h"

namespace tdcopier {

// Leaves that go from one device to one device.
struct IntoGroup {
  c10::Device destination;
  LeafPairs pairs;
  std::shared_ptr<PySources> sources = std::make_shared<PySources>();  // keep the memory of both
  std::shared_ptr<PySources> destinations = std::make_shared<PySources>();
  RecycledVector<uint32_t> numbers{};  // by leaf: its pair in the walk
  MappedLeaves mapped{};               // among the sources

  // Both were added to the tables last.
  void keep(size_t number, pybind11::object from, pybind11::object to) {
    sources->keep(from.release().ptr());
    destinations->keep(to.release().ptr());
    numbers.push_back(static_cast<uint32_t>(number));
  }
  // The last leaf lies in a mapped file.
  void note_mapped() { mapped.note(pairs.leaves.reach(pairs.leaves[pairs.leaves.size() - 1])); }
};

// A leaf that is left to torch.
struct DelegatedPair {
  pybind11::object source;
  pybind11::object destination;
  size_t number;  // in the walk
};

// A leaf that is the very memory of its destination.
struct ReusedPair {
  c10::Device device;
  Area area;
  size_t number;  // in the walk
};

struct SortedPairs {
  std::vector<IntoGroup> groups;
  std::vector<DelegatedPair> delegated;
  RecycledVector<c10::TensorImpl*> written;  // tensors whose version moves; kept by the groups
  std::vector<pybind11::object> kept;        // or here
  std::vector<ReusedPair> reused;
  Users readers;  // of what is delegated
  Users writers;
  uint32_t empty = 0;
  uint32_t opaque = 0;
};

class RowLeaves;

// `rows`: null, or the destinations are tables of which it says what rows are written. GIL: held.
// Throws: as pair_trees(); ValueError, with the path, for what cannot be written or does not fit;
// RuntimeError for a tensor made in inference mode, outside of it, as torch does; IndexError where
// a row is out of range.
SortedPairs sort_pairs(pybind11::handle source, pybind11::handle destination, PairNames names,
                       RowLeaves* rows);

}  // namespace tdcopier
