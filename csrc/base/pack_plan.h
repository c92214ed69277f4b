// Decides which leaf goes to which slot of which chunk, and which leaves travel alone. Pure
// arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// Leaves up to this size share chunks; larger ones travel alone. For a larger leaf, another
// allocation costs less than the delay to the other leaves of its chunk.
inline constexpr uint64_t kMaxPackedLeafBytes = 256 * 1024;

// Kinds are numbers less than this.
inline constexpr uint32_t kMostKinds = 64;

// Returns the smallest multiple of `alignment` that is not less than the value.
inline uint64_t align_up(uint64_t value, uint64_t alignment) {
  // std::has_single_bit compiles to a function call if no target processor is given.
  const bool is_power_of_two = (alignment & (alignment - 1)) == 0;
  if (is_power_of_two) return (value + alignment - 1) & ~(alignment - 1);
  return (value + alignment - 1) / alignment * alignment;
}

struct PackOptions {
  bool pack = true;                             // false: every leaf travels alone
  uint64_t min_alignment_bytes = 16;            // at least 1
  uint64_t max_chunk_bytes = 32 * 1024 * 1024;  // at least 1
  // Only leaves of one kind share a chunk: torch.save refuses a storage whose views have several
  // dtypes.
  bool by_kind = true;

  friend bool operator==(const PackOptions&, const PackOptions&) = default;
};

// The properties of a leaf that the plan depends on.
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

// One piece of memory on the target: an allocation, or existing memory.
struct ChunkPlan {
  uint64_t bytes;            // from the first slot's beginning to the last slot's end
  uint64_t alignment_bytes;  // of the base address, a power of two
  uint32_t first;            // its leaves are order[first, last)
  uint32_t last;
  bool packed;  // false: one leaf that travels alone
  // The chunk has the same layout as the sources' memory from its first leaf on: a run, or leaves
  // of a parcel.
  bool as_source = false;
  bool pinned = false;  // a device can read all of that memory
  // Its leaves arrive in scratch memory of the target, and are scattered from there.
  bool scattered = false;
  // Its offset in the image, in which all chunks follow one another as they are staged or gathered.
  uint64_t begin = 0;

  uint64_t end() const { return begin + bytes; }
};

// Leaves [first, last), by index. Empty leaves may have any address.
struct LeafSeries {
  uint32_t first;
  uint32_t last;
};

struct PackPlan {
  RecycledVector<Slot> slots;  // by leaf
  // Runs first: the device reads them while the rest is staged. Then packed chunks, so that small
  // leaves do not wait for large ones.
  std::vector<ChunkPlan> chunks;
  RecycledVector<uint32_t> order;  // leaf indices by chunk, offsets ascending within a chunk
  uint32_t packed_leaves = 0;
  uint64_t total_bytes = 0;  // of all chunks

  // Returns the offset of a leaf in the image.
  uint64_t begin_of(size_t leaf) const {
    return chunks[slots[leaf].chunk].begin + slots[leaf].offset;
  }

  // Returns the offset in the image of a further chunk that starts at `address` on the target (0:
  // any address): after the existing chunks, at the same offset in a cache line as on the target.
  uint64_t next_begin(uintptr_t address = 0) const;
};

// Returns max(min_alignment, element size), rounded up to a multiple of the element size.
uint64_t slot_alignment_bytes(uint64_t min_alignment_bytes, uint32_t element_bytes);

// Makes the plan. Slots begin at multiples of their alignment, counted from the chunk's beginning.
// The chunk itself is aligned to the largest power of two that divides that alignment. The leaves
// of each run get a chunk of their own.
// Requires: `runs` come from find_runs(), for the same leaves and options.
PackPlan make_pack_plan(std::span<const LeafExtent> leaves, const PackOptions& options,
                        std::span<const LeafSeries> runs = {});

// Finds leaves that are laid out in memory as in a chunk of their own, so that one transfer from
// there fills it. A run is larger than the largest packed leaf: staging less takes no longer than
// another allocation and transfer.
//
// `addresses` are by leaf. Only leaves of one series form a run: those in one piece of memory,
// which may be read as a whole. Series ascend and do not overlap.
std::vector<LeafSeries> find_runs(std::span<const LeafExtent> leaves,
                                  std::span<const uintptr_t> addresses,
                                  std::span<const LeafSeries> series, const PackOptions& options);

}  // namespace tdcopier
