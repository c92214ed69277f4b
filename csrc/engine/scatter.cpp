// As the gather, in the other direction: one kernel, or one call of torch's, for all leaves whose
// bytes lie together at both ends; one call per leaf with gaps.
#include "engine/scatter.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/InferenceMode.h>

#include <vector>

#include "engine/fallbacks.h"
#include "engine/segment_kernel.h"

namespace tdcopier {
namespace {

std::vector<int64_t> in_elements(std::span<const int64_t> strides_bytes, uint32_t element_bytes) {
  std::vector<int64_t> strides(strides_bytes.begin(), strides_bytes.end());
  for (int64_t& stride : strides) stride /= element_bytes;
  return strides;
}

// One end of a leaf's way: its bytes lie together in the order in which they arrive, or not.
struct End {
  const std::byte* data;
  bool strided;
};

class Copies {
 public:
  Copies(Accelerator& accelerator, const LeafTable& leaves, const DestinationTable& destinations)
      : leaves_(leaves), destinations_(destinations), views_(accelerator.views().take()) {}

  void add(uint32_t index, End from) {
    const Leaf& leaf = leaves_[index];
    const Destination& to = destinations_[index];
    if (!from.strided && !to.strided) return views_->add(from.data, to.data, leaf.bytes);
    const auto element_bytes = static_cast<uint32_t>(c10::elementSize(leaf.dtype));
    const at::IntArrayRef sizes = leaves_.sizes(leaf);
    std::vector<int64_t> from_strides = leaves_.strides(leaf).vec();
    std::vector<int64_t> to_strides = from_strides;
    if (from.strided) from_strides = in_elements(leaves_.source_strides_bytes(leaf), element_bytes);
    if (to.strided) {
      to_strides = in_elements(destinations_.strides_bytes(to, leaf.dims), element_bytes);
    }
    views_->strided(to.data, element_bytes, sizes, to_strides)
        .copy_(views_->strided(from.data, element_bytes, sizes, from_strides),
               /*non_blocking=*/true);
  }

  // Whether there were any whose bytes lie together.
  bool enqueue() {
    if (views_->from().empty()) return false;
    at::_foreach_copy_(views_->to(), views_->from(), /*non_blocking=*/true);
    return true;
  }

 private:
  const LeafTable& leaves_;
  const DestinationTable& destinations_;
  ByteViewPool::Lease views_;
};

}  // namespace

void scatter(Accelerator& accelerator, const c10::Stream& stream, const PackPlan& plan,
             const ChunkPlan& chunk, const LeafTable& leaves, const DestinationTable& destinations,
             std::byte* memory) {
  const c10::InferenceMode no_autograd;
  const bool by_kernel = has_segment_kernel(accelerator.device(), chunk.bytes);
  Copies copies(accelerator, leaves, destinations);
  Segments segments(by_kernel ? chunk.last - chunk.first : 0);
  for (uint32_t i = chunk.first; i < chunk.last; ++i) {
    const uint32_t leaf = plan.order[i];
    const uint64_t offset = plan.slots[leaf].offset;
    if (by_kernel && !destinations[leaf].strided) {
      segments.add(destinations[leaf].data, offset, leaves[leaf].bytes);
    } else {
      copies.add(leaf, {memory + offset, /*strided=*/false});
    }
  }
  move_segments(stream, Move::kScatter, memory, segments.all());
  if (copies.enqueue()) note_fallback(accelerator.device().type());
}

void copy_within(Accelerator& accelerator, const LeafTable& leaves,
                 const DestinationTable& destinations) {
  const c10::InferenceMode no_autograd;
  Copies copies(accelerator, leaves, destinations);
  for (uint32_t leaf = 0; leaf < leaves.size(); ++leaf) {
    copies.add(leaf, {static_cast<const std::byte*>(leaves[leaf].data), leaves[leaf].strided});
  }
  copies.enqueue();
}

}  // namespace tdcopier
