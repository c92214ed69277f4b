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

// Leaves are of fewer kinds than this.
inline constexpr uint32_t kMostKinds = 64;

struct PackOptions {
  bool pack = true;                             // false: every leaf travels alone
  uint64_t min_alignment_bytes = 16;            // at least 1
  uint64_t max_chunk_bytes = 32 * 1024 * 1024;  // at least 1
  // Only leaves of one kind share a chunk. torch saves no storage whose views have several dtypes.
  bool by_kind = true;
};

// What the plan needs to know of a leaf.
struct LeafExtent {
  uint64_t bytes;          // contiguous bytes, 0 allowed
  uint32_t element_bytes;  // at least 1
  uint32_t kind = 0;       // its dtype, as a number less than kMostKinds
};

// One leaf's place: bytes [offset, offset + leaf bytes) of its chunk.
struct Slot {
  uint32_t chunk;
  uint64_t offset;
};

// One piece of memory on the target: an allocation, or memory that exists.
struct ChunkPlan {
  uint64_t bytes;            // from the first slot's beginning to the last slot's end
  uint64_t alignment_bytes;  // of the base address, a power of two
  uint32_t first;            // its leaves are order[first, last)
  uint32_t last;
  bool packed;  // false: one leaf that travels alone
  // A run: its bytes lie in the sources' memory in just the same way, from its first leaf on.
  bool as_source = false;
  // Its leaves arrive in scratch memory of the target, and are scattered from there.
  bool scattered = false;
  // Where it begins in the image: all chunks one after the other, as they are staged or gathered.
  uint64_t begin = 0;

  uint64_t end() const { return begin + bytes; }
};

// Leaves [first, last), by index. Those without bytes may be anywhere.
struct LeafSeries {
  uint32_t first;
  uint32_t last;
};

struct PackPlan {
  RecycledVector<Slot> slots;  // by leaf
  // Runs first: the device reads them while the rest is staged. Then packed chunks: small leaves do
  // not wait for large ones.
  std::vector<ChunkPlan> chunks;
  RecycledVector<uint32_t> order;  // leaf indices by chunk, offsets ascending within a chunk
  uint32_t packed_leaves = 0;
  uint64_t total_bytes = 0;  // of all chunks

  // Where a chunk that starts at `address` on the target (0: anywhere) begins in the image, after
  // what the image has: at the same place in a cache line as on the target.
  uint64_t next_begin(uintptr_t address = 0) const;
};

// max(min_alignment, element size), rounded up to a multiple of the element size.
uint64_t slot_alignment_bytes(uint64_t min_alignment_bytes, uint32_t element_bytes);

// Slots begin at multiples of their alignment, counted from the chunk's beginning. The chunk itself
// is aligned to the power of two in it. The leaves of each run get a chunk of their own.
// Requires: `find_runs` has found the runs, for the same leaves and options.
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
