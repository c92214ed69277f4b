// Leaves with strides are added with the strides of both ends.
#include "python/walk/into_group.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/DimVector.h>

#include <cstdlib>
#include <vector>

#include "base/overlap.h"
#include "engine/moves/stage.h"

namespace tdcopier {

void IntoGroup::reserve(size_t leaves) {
  pairs.leaves.reserve(leaves);
  pairs.destinations.reserve(leaves);
  sources->reserve(leaves + 1);
  numbers.reserve(leaves);
}

void IntoGroup::add_source(const PlainLeaf& source) {
  pairs.leaves.add_bytes(source.data, source.dtype, source.bytes(),
                         static_cast<uint32_t>(source.element_bytes()));
}

// In between, the elements have the destination's order of dimensions, without its gaps.
bool IntoGroup::add_strided(const PlainLeaf& source, const PlainLeaf& target) {
  // Only their relative sizes matter. No DimVector: GCC 12 warns here of one, without a reason.
  std::vector<int64_t> order(target.strides_bytes.begin(), target.strides_bytes.end());
  for (int64_t& stride : order) stride = std::abs(stride);
  const std::vector<int64_t> dense = at::infer_dense_strides(target.sizes, order);
  c10::DimVector dense_bytes(dense.begin(), dense.end());
  for (int64_t& stride : dense_bytes) stride *= static_cast<int64_t>(target.element_bytes());
  auto& [leaves, written] = pairs;
  if (source.has_steps(dense_bytes)) {
    leaves.add(source.data, source.dtype, source.sizes, dense);
  } else {
    leaves.add_strided(source.data, source.dtype, source.sizes, dense, source.strides_bytes);
  }
  if (target.has_steps(dense_bytes)) {
    written.add(target.data, target.storage, /*pinned=*/false);
    return true;
  }
  const Leaf& leaf = leaves[leaves.size() - 1];
  if (overlaps_itself(dims_as_they_arrive(leaves, leaf, target.strides_bytes),
                      target.element_bytes())) {
    return false;
  }
  written.add_strided(target.data, target.storage, target.strides_bytes);
  return true;
}

}  // namespace tdcopier
