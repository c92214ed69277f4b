// Decides which leaf goes to which slot of which chunk, and which leaves travel alone: pure
// arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// A leaf up to this size shares a chunk; a larger one travels alone. Past 256 KiB one more
// allocation costs less than what the neighbours would wait for.
inline constexpr uint64_t kMaxPackedLeafBytes = 256 * 1024;

// A chunk whose slots agree on no base alignment up to this one is closed and another is begun.
inline constexpr uint64_t kMaxCommonAlignmentBytes = 1 << 20;

struct PackOptions {
  bool pack = true;                             // false: every leaf travels alone
  uint64_t min_alignment_bytes = 16;            // at least 1
  uint64_t max_chunk_bytes = 32 * 1024 * 1024;  // at least 1
};

// What the plan needs to know of a leaf.
struct LeafExtent {
  uint64_t bytes;          // contiguous bytes, 0 allowed
  uint32_t element_bytes;  // at least 1
};

// One leaf's place: bytes [offset, offset + leaf bytes) of its chunk.
struct Slot {
  uint32_t chunk;
  uint64_t offset;
};

// One allocation on the target.
struct ChunkPlan {
  uint64_t bytes;            // from the first slot's beginning to the last slot's end
  uint64_t alignment_bytes;  // the base address must be a multiple: every slot is aligned then
  uint32_t first;            // its leaves are order[first, last)
  uint32_t last;
  bool packed;  // false: one leaf that travels alone
  // A run: its bytes lie in the sources' memory in just the same way, from its first leaf on.
  bool as_source = false;
};

// Leaves [first, last), by index. Those without bytes may be anywhere.
struct LeafSeries {
  uint32_t first;
  uint32_t last;
};

struct PackPlan {
  RecycledVector<Slot> slots;  // by leaf
  // Runs first: what nobody has to stage is under way while the rest is staged. Then packed chunks:
  // small leaves do not wait behind large ones.
  std::vector<ChunkPlan> chunks;
  RecycledVector<uint32_t> order;  // leaf indices by chunk, offsets ascending within a chunk
  uint32_t packed_leaves = 0;
  uint64_t total_bytes = 0;  // of all chunks
};

// max(min_alignment, element size), rounded up to a multiple of the element size.
uint64_t slot_alignment_bytes(uint64_t min_alignment_bytes, uint32_t element_bytes);

// The leaves of each run get a chunk of their own. Requires: `find_runs` has found the runs, for
// the same leaves and options.
PackPlan make_pack_plan(std::span<const LeafExtent> leaves, const PackOptions& options,
                        std::span<const LeafSeries> runs = {});

// Which leaves lie in memory as they would lie in a chunk of their own, so that it is filled by one
// transfer from there. A run is larger than a leaf that is packed: to stage less takes no longer
// than another allocation and transfer.
//
// `addresses` are by leaf. Only leaves of one series form a run: those of one piece of memory,
// which may be read as a whole. Series ascend, and have no leaf in common.
std::vector<LeafSeries> find_runs(std::span<const LeafExtent> leaves,
                                  std::span<const uintptr_t> addresses,
                                  std::span<const LeafSeries> series, const PackOptions& options);

}  // namespace tdcopier
