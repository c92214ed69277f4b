// Finds memory that a copy would write, and read or write once more for another leaf.
#pragma once

#include <optional>
#include <utility>

#include "python/sort_pairs.h"

namespace tdcopier {

// One end of a pair.
struct PairEnd {
  size_t number;  // in the walk
  bool written;   // the destination, else the source
};

// Two ends that share memory, in the order of the walk. `leaves`: how many pairs there are, at
// most. Leaves that are delegated are not compared.
std::optional<std::pair<PairEnd, PairEnd>> find_shared_memory(const SortedPairs& pairs,
                                                              size_t leaves);

}  // namespace tdcopier
