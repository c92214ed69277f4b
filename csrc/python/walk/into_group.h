// The pairs of leaves that the engine copies from one device to one other, and how one is added.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/recycled.h"
#include "engine/device/pinned_ranges.h"
#include "engine/leaves/destination.h"
#include "engine/leaves/mapped_leaves.h"
#include "python/walk/pair_leaf.h"
#include "python/walk/sources.h"

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

  // Reserves memory for this number of pairs.
  void reserve(size_t leaves);
  // Adds the bytes of a source that is dense. Its destination is added apart.
  void add_source(const PlainLeaf& source);
  // Adds a pair with any strides at both ends. Returns false if elements of the destination share
  // memory: the group is not to be used then.
  [[nodiscard]] bool add_strided(const PlainLeaf& source, const PlainLeaf& target);
  // Marks the source added last as memory-mapped. Requires: it is not rows.
  void note_mapped() { mapped.note(pairs.leaves.reach(pairs.leaves[pairs.leaves.size() - 1])); }
};

}  // namespace tdcopier
