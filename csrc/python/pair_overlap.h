// Finds memory that a copy would write for one leaf, and read or write for another.
// sort_pairs.cpp refuses such a copy with a ValueError before anything is written. Sorts the memory
// of all leaves by address, and compares leaves whose bounds overlap row by row (base/overlap.h).
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "python/sort_pairs.h"

namespace tdcopier {

// One end of a pair.
struct PairEnd {
  size_t number;  // in the walk
  bool written;   // the destination, else the source
};

// Why a destination that overlaps itself is refused.
inline constexpr const char* kSharesItsMemory =
    " has elements that share memory (was it made with expand() or as_strided()?): give one with "
    "memory for each, such as a clone()";

// Returns the memory that delegated leaves read and write, as far as they are plain strided
// tensors: what a class writes, only its own code knows. GIL: held.
std::vector<OtherArea> areas_of_delegated(const std::vector<DelegatedPair>& pairs);

// Returns two ends that share memory, in the order of the walk. `leaves`: an upper bound of the
// number of pairs.
std::optional<std::pair<PairEnd, PairEnd>> find_shared_memory(const SortedPairs& pairs,
                                                              size_t leaves);

}  // namespace tdcopier
