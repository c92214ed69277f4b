// Copies each leaf's bytes, clipped to the window.
#include "engine/moves/deliver.h"

#include <cstring>
#include <memory>

#include "base/row_copy.h"
#include "base/strided_copy.h"

namespace tdcopier {
namespace {

void deliver_leaf(const LeafTable& leaves, const DestinationTable& destinations, uint32_t index,
                  LeafRange range, const std::byte* from) {
  const Leaf& leaf = leaves[index];
  const Destination& to = destinations[index];
  if (!to.strided) {
    std::memcpy(to.data + range.begin, from, range.end - range.begin);
    return;
  }
  if (to.is_rows()) {
    return scatter_rows(to.data, destinations.row_table(to).layout, destinations.rows(),
                        range.begin, range.end, from);
  }
  const auto element_bytes = static_cast<uint32_t>(c10::elementSize(leaf.dtype));
  const std::vector<StridedDim> dims =
      dims_as_they_arrive(leaves, leaf, destinations.strides_bytes(to, leaf.dims));
  copy_to_strided(to.data, dims, element_bytes, range.begin / element_bytes,
                  range.end / element_bytes, from);
}

}  // namespace

void deliver_window(const PackPlan& plan, const LeafTable& leaves,
                    const DestinationTable& destinations, const Window& window,
                    const std::byte* staged) {
  for_each_in_window(plan, leaves, window, [&](uint32_t leaf, LeafRange range, uint64_t at) {
    deliver_leaf(leaves, destinations, leaf, range, staged + at);
  });
}

void copy_window(const PackPlan& plan, const LeafTable& leaves,
                 const DestinationTable& destinations, const Window& window) {
  std::unique_ptr<std::byte[]> between;
  for_each_in_window(plan, leaves, window, [&](uint32_t leaf, LeafRange range, uint64_t) {
    const Destination& to = destinations[leaf];
    if (!to.strided) return stage_leaf(leaves, leaves[leaf], range, to.data + range.begin);
    if (!leaves[leaf].strided) {
      const auto* from = static_cast<const std::byte*>(leaves[leaf].data) + range.begin;
      return deliver_leaf(leaves, destinations, leaf, range, from);
    }
    if (!between) {
      between = std::make_unique_for_overwrite<std::byte[]>(window.end - window.begin);
    }
    stage_leaf(leaves, leaves[leaf], range, between.get());
    deliver_leaf(leaves, destinations, leaf, range, between.get());
  });
}

}  // namespace tdcopier
