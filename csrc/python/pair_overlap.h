// Finds memory that a copy would write, and read or write once more for another leaf.
#pragma once

#include <optional>

#include "python/sort_pairs.h"

namespace tdcopier {

// One end of a pair.
struct PairEnd {
  size_t number;     // in the walk
  const char* tree;  // "source" or "destination"
};

// In the order of the walk.
struct SharedMemory {
  PairEnd first;
  PairEnd second;
};

// `leaves`: how many pairs there are, at most. Leaves that are delegated are not compared.
std::optional<SharedMemory> find_shared_memory(const SortedPairs& pairs, size_t leaves);

}  // namespace tdcopier
