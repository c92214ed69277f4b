// One kernel for all leaves whose bytes lie together, or where there is none one call of torch's;
// one call per leaf with gaps.
#include "engine/gather.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/InferenceMode.h>

#include <vector>

#include "engine/fallbacks.h"
#include "engine/segment_kernel.h"

namespace tdcopier {
namespace {

void gather_strided(const ByteViews& views, const LeafTable& leaves, const Leaf& leaf,
                    std::byte* slot) {
  const auto element_bytes = static_cast<uint32_t>(c10::elementSize(leaf.dtype));
  const at::IntArrayRef sizes = leaves.sizes(leaf);
  std::vector<int64_t> source_strides = leaves.source_strides_bytes(leaf).vec();
  for (int64_t& stride : source_strides) stride /= element_bytes;
  views.strided(slot, element_bytes, sizes, leaves.strides(leaf))
      .copy_(views.strided(leaf.data, element_bytes, sizes, source_strides),
             /*non_blocking=*/true);
}

}  // namespace

void gather(Accelerator& accelerator, const c10::Stream& stream, const PackPlan& plan,
            const ChunkPlan& chunk, const LeafTable& leaves, std::byte* memory) {
  const c10::InferenceMode no_autograd;
  const bool by_kernel = has_segment_kernel(accelerator.device(), chunk.bytes);
  ByteViewPool::Lease views = accelerator.views().take();
  Segments segments(by_kernel ? chunk.last - chunk.first : 0);
  for (uint32_t i = chunk.first; i < chunk.last; ++i) {
    const Leaf& leaf = leaves[plan.order[i]];
    const uint64_t offset = plan.slots[plan.order[i]].offset;
    if (leaf.bytes == 0) continue;
    if (leaf.strided) {
      gather_strided(*views, leaves, leaf, memory + offset);
    } else if (by_kernel) {
      segments.add(leaf.data, offset, leaf.bytes);
    } else {
      views->add(leaf.data, memory + offset, leaf.bytes);
    }
  }
  move_segments(stream, Move::kGather, memory, segments.all());
  if (views->from().empty()) return;
  note_fallback(accelerator.device().type());
  at::_foreach_copy_(views->to(), views->from(), /*non_blocking=*/true);
}

}  // namespace tdcopier
