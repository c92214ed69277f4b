// The pack plan: one pass fills shared chunks in leaf order, a second one gives each large leaf its
// own.
#include "base/pack_plan.h"

#include <algorithm>
#include <numeric>

namespace tdcopier {
namespace {

uint64_t align_up(uint64_t value, uint64_t alignment) {
  // std::has_single_bit calls a function where no processor is named to compile for.
  const bool is_power_of_two = (alignment & (alignment - 1)) == 0;
  if (is_power_of_two) return (value + alignment - 1) & ~(alignment - 1);
  return (value + alignment - 1) / alignment * alignment;
}

// The base alignment that serves both, or 0 where it would pass the common bound.
uint64_t common_alignment(uint64_t base, uint64_t slot) {
  if (base == slot || base % slot == 0) return base;
  const uint64_t step = slot / std::gcd(base, slot);
  if (step > kMaxCommonAlignmentBytes / base) return 0;
  return base * step;
}

bool is_packable(const LeafExtent& leaf, const PackOptions& options) {
  return options.pack && leaf.bytes <= std::min(kMaxPackedLeafBytes, options.max_chunk_bytes);
}

}  // namespace

uint64_t slot_alignment_bytes(uint64_t min_alignment_bytes, uint32_t element_bytes) {
  return align_up(std::max<uint64_t>(min_alignment_bytes, element_bytes), element_bytes);
}

PackPlan make_pack_plan(std::span<const LeafExtent> leaves, const PackOptions& options) {
  PackPlan plan;
  plan.slots.resize(leaves.size());
  plan.order.reserve(leaves.size());

  const auto place = [&](uint32_t leaf, uint64_t offset) {
    ChunkPlan& chunk = plan.chunks.back();
    plan.slots[leaf] = {static_cast<uint32_t>(plan.chunks.size() - 1), offset};
    plan.order.push_back(leaf);
    chunk.bytes = offset + leaves[leaf].bytes;
    chunk.last = static_cast<uint32_t>(plan.order.size());
  };
  const auto open_chunk = [&](uint64_t alignment, bool packed) {
    const auto first = static_cast<uint32_t>(plan.order.size());
    plan.chunks.push_back({0, alignment, first, first, packed});
  };

  uint32_t last_element_bytes = 0;  // runs of one dtype are common: spare them the division
  uint64_t alignment = 1;
  for (uint32_t leaf = 0; leaf < leaves.size(); ++leaf) {
    if (!is_packable(leaves[leaf], options)) continue;
    if (leaves[leaf].element_bytes != last_element_bytes) {
      last_element_bytes = leaves[leaf].element_bytes;
      alignment = slot_alignment_bytes(options.min_alignment_bytes, last_element_bytes);
    }
    if (plan.chunks.empty()) open_chunk(alignment, true);
    ChunkPlan& open = plan.chunks.back();
    const uint64_t common = common_alignment(open.alignment_bytes, alignment);
    uint64_t offset = align_up(open.bytes, alignment);
    if (common == 0 || offset + leaves[leaf].bytes > options.max_chunk_bytes) {
      open_chunk(alignment, true);
      offset = 0;
    } else {
      open.alignment_bytes = common;
    }
    place(leaf, offset);
  }
  plan.packed_leaves = static_cast<uint32_t>(plan.order.size());

  for (uint32_t leaf = 0; leaf < leaves.size(); ++leaf) {
    if (is_packable(leaves[leaf], options)) continue;
    open_chunk(leaves[leaf].element_bytes, false);
    place(leaf, 0);
  }
  for (const ChunkPlan& chunk : plan.chunks) plan.total_bytes += chunk.bytes;
  return plan;
}

}  // namespace tdcopier
