// Finds memory that a copy would write for one leaf, and read or write for another.
// sort_pairs.cpp refuses such a copy with a ValueError before anything is written. Sorts the memory
// of all leaves by address, and compares leaves whose bounds overlap row by row (base/overlap.h).
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

// Returns two ends that share memory, in the order of the walk. Of delegated leaves, only strided
// tensors are compared, and none if rows are moved. `leaves`: an upper bound of the number of
// pairs.
std::optional<std::pair<PairEnd, PairEnd>> find_shared_memory(const SortedPairs& pairs,
                                                              size_t leaves);

}  // namespace tdcopier
