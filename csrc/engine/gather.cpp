// The portable gather: one call of torch's for all leaves whose bytes lie together, one per leaf
// with gaps.
#include "engine/gather.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/InferenceMode.h>

#include <vector>

namespace tdcopier {

void gather(Accelerator& accelerator, const PackPlan& plan, const ChunkPlan& chunk,
            const LeafTable& leaves, std::byte* memory) {
  const c10::InferenceMode no_autograd;
  ByteViewPool::Lease views = accelerator.views().take();
  for (uint32_t i = chunk.first; i < chunk.last; ++i) {
    const Leaf& leaf = leaves[plan.order[i]];
    std::byte* slot = memory + plan.slots[plan.order[i]].offset;
    if (leaf.bytes == 0) continue;
    if (!leaf.strided) {
      views->add(leaf.data, slot, leaf.bytes);
      continue;
    }
    const auto element_bytes = static_cast<uint32_t>(c10::elementSize(leaf.dtype));
    const at::IntArrayRef sizes = leaves.sizes(leaf);
    std::vector<int64_t> source_strides = leaves.source_strides_bytes(leaf).vec();
    for (int64_t& stride : source_strides) stride /= element_bytes;
    views->strided(slot, element_bytes, sizes, leaves.strides(leaf))
        .copy_(views->strided(leaf.data, element_bytes, sizes, source_strides),
               /*non_blocking=*/true);
  }
  if (!views->from().empty()) at::_foreach_copy_(views->to(), views->from(), /*non_blocking=*/true);
}

}  // namespace tdcopier
