// Finds memory that a copy would write for one leaf, and read or write for another.
// sort_pairs.cpp refuses such a copy with a ValueError before anything is written. Sorts the memory
// of all leaves by address, and compares leaves whose bounds overlap row by row (base/overlap.h).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "python/walk/sort_pairs.h"

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

// The elements of a tensor or an array: where they are, and how they are read.
struct LeafMemory {
  c10::Device device;
  const std::byte* data;  // the first element
  c10::ScalarType dtype;
  c10::DimVector sizes;
  c10::DimVector strides_bytes;
  bool is_conj;
  bool is_neg;

  // Strides of dimensions of size 1 may differ.
  bool operator==(const LeafMemory& other) const;
};

// Recognises tied pairs: those whose source is the memory of another pair's source, and whose
// destination that of its destination, such as two names of one weight in both trees. Their order
// does not matter. GIL: held.
class TiedPairs {
 public:
  // Delegated pairs are all copied, because `copy_` may do more than write bytes. They run in
  // order, and before all others.
  explicit TiedPairs(const std::vector<DelegatedPair>& delegated);

  // Returns whether a pair is tied to a delegated one, or to one that was asked about before.
  // Requires: the engine can copy it, and its leaves have elements.
  bool is_tied(pybind11::object source, pybind11::object destination);
  bool is_delegated(size_t number) const { return delegated_.contains(number); }
  // Returns whether this delegated pair is tied to one before it.
  bool is_delegated_again(size_t number) const { return again_.contains(number); }

 private:
  // Without known memory, for example a tensor of a class of its own, only the object itself is the
  // same.
  struct End {
    pybind11::object leaf;
    std::optional<LeafMemory> memory;
    bool is_same(const End& other) const {
      return leaf.is(other.leaf) || (memory && memory == other.memory);
    }
  };
  bool note(End source, End destination);

  std::unordered_multimap<const void*, std::pair<End, End>> found_;  // by memory or object written
  std::unordered_set<size_t> delegated_;
  std::unordered_set<size_t> again_;
};

// Returns the memory that delegated leaves read and write, as far as they are plain strided
// tensors: what a class writes, only its own code knows. GIL: held.
std::vector<OtherArea> areas_of_delegated(const std::vector<DelegatedPair>& pairs);

// Returns two ends that share memory, in the order of the walk. `leaves`: an upper bound of the
// number of pairs.
std::optional<std::pair<PairEnd, PairEnd>> find_shared_memory(const SortedPairs& pairs,
                                                              size_t leaves);

}  // namespace tdcopier
