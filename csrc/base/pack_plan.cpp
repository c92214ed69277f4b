// Makes a chunk for each run, then fills shared chunks in leaf order, with one open chunk per kind,
// and at last gives each large leaf a chunk of its own.
#include "base/pack_plan.h"

#include <algorithm>
#include <array>

#include "base/cache_line.h"
#include "base/internal_error.h"

namespace tdcopier {
namespace {

uint64_t power_of_two_in(uint64_t alignment) {
  return alignment & (~alignment + 1);
}

bool is_packable(const LeafExtent& leaf, const PackOptions& options) {
  return options.pack && leaf.bytes <= std::min(kMaxPackedLeafBytes, options.max_chunk_bytes);
}

class Planner {
 public:
  Planner(std::span<const LeafExtent> leaves, const PackOptions& options)
      : leaves_(leaves), options_(options) {
    plan_.slots.resize(leaves.size());
    open_.fill(kNone);
  }

  PackPlan make(std::span<const LeafSeries> runs) {
    for (const LeafSeries& run : runs) place_run(run);
    place_packed(runs);
    for (const ChunkPlan& chunk : plan_.chunks) plan_.packed_leaves += chunk.last;
    place_alone();
    put_in_order();
    for (ChunkPlan& chunk : plan_.chunks) {
      chunk.begin = end_of_image_ == 0 ? 0 : align_up(end_of_image_, kLineBytes);
      end_of_image_ = chunk.end();
      plan_.total_bytes += chunk.bytes;
    }
    return std::move(plan_);
  }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  // Until put_in_order(), a chunk's `last` counts its leaves.
  void open_chunk(uint32_t kind, bool packed) {
    open_[kind] = static_cast<uint32_t>(plan_.chunks.size());
    plan_.chunks.push_back({0, 1, 0, 0, packed});
  }

  void pack(uint32_t leaf) {
    const LeafExtent& extent = leaves_[leaf];
    const uint32_t kind = options_.by_kind ? extent.kind : 0;
    if (extent.element_bytes != last_element_bytes_) {  // most leaves of a batch have one dtype
      last_element_bytes_ = extent.element_bytes;
      alignment_ = slot_alignment_bytes(options_.min_alignment_bytes, last_element_bytes_);
    }
    if (open_[kind] == kNone) open_chunk(kind, true);
    uint64_t offset = align_up(plan_.chunks[open_[kind]].bytes, alignment_);
    if (offset + extent.bytes > options_.max_chunk_bytes) {
      open_chunk(kind, true);
      offset = 0;
    }
    ChunkPlan& chunk = plan_.chunks[open_[kind]];
    chunk.alignment_bytes = std::max(chunk.alignment_bytes, power_of_two_in(alignment_));
    chunk.bytes = offset + extent.bytes;
    ++chunk.last;
    plan_.slots[leaf] = {open_[kind], offset};
  }

  void place_run(const LeafSeries& run) {
    open_.fill(kNone);
    const size_t before = plan_.chunks.size();
    for (uint32_t leaf = run.first; leaf < run.last; ++leaf) {
      if (leaves_[leaf].bytes != 0) pack(leaf);
    }
    check_invariant(plan_.chunks.size() == before + 1, "a run is one chunk");
    plan_.chunks.back().as_source = plan_.chunks.back().pinned = true;
  }

  void place_packed(std::span<const LeafSeries> runs) {
    open_.fill(kNone);
    auto run = runs.begin();  // the first run that does not end before the leaf
    for (uint32_t leaf = 0; leaf < leaves_.size(); ++leaf) {
      if (!is_packable(leaves_[leaf], options_)) continue;
      while (run != runs.end() && run->last <= leaf) ++run;
      const bool is_in_run = run != runs.end() && run->first <= leaf && leaves_[leaf].bytes != 0;
      if (!is_in_run) pack(leaf);
    }
  }

  void place_alone() {
    for (uint32_t leaf = 0; leaf < leaves_.size(); ++leaf) {
      const LeafExtent& extent = leaves_[leaf];
      if (is_packable(extent, options_)) continue;
      plan_.slots[leaf] = {static_cast<uint32_t>(plan_.chunks.size()), 0};
      plan_.chunks.push_back({extent.bytes, power_of_two_in(extent.element_bytes), 0, 1, false});
    }
  }

  void put_in_order() {
    uint32_t first = 0;
    for (ChunkPlan& chunk : plan_.chunks) {
      const uint32_t leaves = chunk.last;
      chunk.first = chunk.last = first;  // the loop below increments `last`
      first += leaves;
    }
    plan_.order.resize(first);
    for (uint32_t leaf = 0; leaf < leaves_.size(); ++leaf) {
      plan_.order[plan_.chunks[plan_.slots[leaf].chunk].last++] = leaf;
    }
  }

  const std::span<const LeafExtent> leaves_;
  const PackOptions& options_;
  PackPlan plan_;
  std::array<uint32_t, kMostKinds> open_{};  // by kind: the open chunk, or kNone
  uint32_t last_element_bytes_ = 0;
  uint64_t alignment_ = 1;
  uint64_t end_of_image_ = 0;
};

}  // namespace

uint64_t slot_alignment_bytes(uint64_t min_alignment_bytes, uint32_t element_bytes) {
  return align_up(std::max<uint64_t>(min_alignment_bytes, element_bytes), element_bytes);
}

uint64_t PackPlan::next_begin(uintptr_t address) const {
  const uint64_t end = chunks.empty() ? 0 : chunks.back().end();
  return align_up(end, kLineBytes) + address % kLineBytes;
}

PackPlan make_pack_plan(std::span<const LeafExtent> leaves, const PackOptions& options,
                        std::span<const LeafSeries> runs) {
  return Planner(leaves, options).make(runs);
}

std::vector<LeafSeries> find_runs(std::span<const LeafExtent> leaves,
                                  std::span<const uintptr_t> addresses,
                                  std::span<const LeafSeries> series, const PackOptions& options) {
  std::vector<LeafSeries> runs;
  for (const LeafSeries& those : series) {
    LeafSeries run{};
    uint64_t bytes = 0;  // of the open run; 0: none is open
    const auto end_run = [&] {
      if (bytes > kMaxPackedLeafBytes) runs.push_back(run);
      bytes = 0;
    };
    for (uint32_t leaf = those.first; leaf < those.last; ++leaf) {
      if (leaves[leaf].bytes == 0) continue;
      const uint64_t alignment =
          slot_alignment_bytes(options.min_alignment_bytes, leaves[leaf].element_bytes);
      const uint64_t offset = align_up(bytes, alignment);
      // The leaf is exactly where its slot would be, so any gap equals the padding.
      const bool goes_on = bytes != 0 && addresses[leaf] == addresses[run.first] + offset &&
                           leaves[leaf].kind == leaves[run.first].kind &&
                           is_packable(leaves[leaf], options) &&
                           offset + leaves[leaf].bytes <= options.max_chunk_bytes;
      if (goes_on) {
        run.last = leaf + 1;
        bytes = offset + leaves[leaf].bytes;
        continue;
      }
      end_run();
      if (!is_packable(leaves[leaf], options)) continue;
      run = {leaf, leaf + 1};
      bytes = leaves[leaf].bytes;
    }
    end_run();
  }
  return runs;
}

}  // namespace tdcopier
