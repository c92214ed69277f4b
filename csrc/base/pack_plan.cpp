// The pack plan: a chunk for each run, then one pass fills shared chunks in leaf order, and a last
// one gives each large leaf its own.
#include "base/pack_plan.h"

#include <algorithm>
#include <numeric>

#include "base/internal_error.h"

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

PackPlan make_pack_plan(std::span<const LeafExtent> leaves, const PackOptions& options,
                        std::span<const LeafSeries> runs) {
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

  uint32_t last_element_bytes = 0;  // leaves of one dtype come together: spare them the division
  uint64_t alignment = 1;
  bool is_open = false;
  const auto pack = [&](uint32_t leaf) {
    if (leaves[leaf].element_bytes != last_element_bytes) {
      last_element_bytes = leaves[leaf].element_bytes;
      alignment = slot_alignment_bytes(options.min_alignment_bytes, last_element_bytes);
    }
    if (!is_open) open_chunk(alignment, true);
    is_open = true;
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
  };

  for (const LeafSeries& run : runs) {
    is_open = false;
    const size_t before = plan.chunks.size();
    for (uint32_t leaf = run.first; leaf < run.last; ++leaf) {
      if (leaves[leaf].bytes != 0) pack(leaf);
    }
    check_invariant(plan.chunks.size() == before + 1, "a run is one chunk");
    plan.chunks.back().as_source = true;
  }

  is_open = false;
  auto run = runs.begin();  // the first that does not end before the leaf
  for (uint32_t leaf = 0; leaf < leaves.size(); ++leaf) {
    if (!is_packable(leaves[leaf], options)) continue;
    while (run != runs.end() && run->last <= leaf) ++run;
    const bool is_in_run = run != runs.end() && run->first <= leaf && leaves[leaf].bytes != 0;
    if (!is_in_run) pack(leaf);
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

std::vector<LeafSeries> find_runs(std::span<const LeafExtent> leaves,
                                  std::span<const uintptr_t> addresses,
                                  std::span<const LeafSeries> series, const PackOptions& options) {
  std::vector<LeafSeries> runs;
  for (const LeafSeries& those : series) {
    LeafSeries run{};
    uint64_t bytes = 0;  // of the run; 0: there is none
    uint64_t run_alignment = 1;
    const auto end_run = [&] {
      if (bytes > kMaxPackedLeafBytes) runs.push_back(run);
      bytes = 0;
    };
    for (uint32_t leaf = those.first; leaf < those.last; ++leaf) {
      if (leaves[leaf].bytes == 0) continue;
      const uint64_t alignment =
          slot_alignment_bytes(options.min_alignment_bytes, leaves[leaf].element_bytes);
      const uint64_t common = common_alignment(run_alignment, alignment);
      const uint64_t offset = align_up(bytes, alignment);
      // Just where its slot would be, so that a gap is what padding would be.
      const bool goes_on = bytes != 0 && addresses[leaf] == addresses[run.first] + offset &&
                           common != 0 && is_packable(leaves[leaf], options) &&
                           offset + leaves[leaf].bytes <= options.max_chunk_bytes;
      if (goes_on) {
        run.last = leaf + 1;
        bytes = offset + leaves[leaf].bytes;
        run_alignment = common;
        continue;
      }
      end_run();
      if (!is_packable(leaves[leaf], options)) continue;
      run = {leaf, leaf + 1};
      bytes = leaves[leaf].bytes;
      run_alignment = alignment;
    }
    end_run();
  }
  return runs;
}

}  // namespace tdcopier
