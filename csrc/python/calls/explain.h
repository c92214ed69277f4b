// Says what a copy would do with each value of a tree, from the decisions of the copy itself.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "python/calls/start_copy.h"

namespace tdcopier {

// What a copy does with a value, and why; `_explain.py` has the words.
enum class Reason : uint8_t {
  // Packed:
  kPacked,
  kPackedByKernel,
  // Alone:
  kPackingIsOff,
  kLarge,
  kLargerThanChunk,
  // Delegated, as WhyDelegated says, or the tensor is not plain:
  kClass,
  kObject,
  kTorchMode,
  kDevice,
  kOtherKeys,
  kNamed,
  kNoStorage,
  kGradient,
  kForwardGradient,
  kTooLarge,
  kUnaligned,
  // Not copied:
  kReused,
  kOpaque,
};

// Returns what tdcopier/_explain.py makes an Explanation of: the target, a list with a tuple for
// each leaf and opaque value in the order of the walk, and the numbers of chunks, transfers and
// transferred bytes. The fields of such a tuple are those of `Found` there. Copies nothing, and
// calls no `.to`. GIL: held.
// Throws: as start_copy(), except for unknown values.
pybind11::tuple explain(pybind11::handle data, pybind11::handle device, const CopyOptions& options);

}  // namespace tdcopier
