// Tests the pack plan: alignment, disjoint slots, chunk bounds, and order.
#include "base/pack_plan.h"

#include <random>

#include "check.h"

using namespace tdcopier;

namespace pack_plan_test {
namespace {

// Checks the invariants of every plan, for any leaves and options.
void check_invariants(const std::vector<LeafExtent>& leaves, const PackOptions& options) {
  const PackPlan plan = make_pack_plan(leaves, options);
  CHECK(plan.slots.size() == leaves.size());
  CHECK(plan.order.size() == leaves.size());
  std::vector<int> seen(leaves.size());
  uint32_t packed = 0;
  uint64_t total = 0;
  uint32_t next = 0;
  bool still_packed = true;
  for (uint32_t c = 0; c < plan.chunks.size(); ++c) {
    const ChunkPlan& chunk = plan.chunks[c];
    CHECK(chunk.first == next && chunk.last > chunk.first);
    next = chunk.last;
    CHECK(!chunk.packed || still_packed);  // packed chunks come first
    still_packed = chunk.packed;
    CHECK(!chunk.packed || chunk.bytes <= options.max_chunk_bytes);
    CHECK(chunk.packed || chunk.last - chunk.first == 1);
    uint64_t end = 0;
    for (uint32_t i = chunk.first; i < chunk.last; ++i) {
      const uint32_t leaf = plan.order[i];
      const Slot& slot = plan.slots[leaf];
      ++seen[leaf];
      CHECK(slot.chunk == c);
      CHECK(slot.offset >= end);
      end = slot.offset + leaves[leaf].bytes;
      if (chunk.packed) {
        ++packed;
        const uint64_t alignment =
            slot_alignment_bytes(options.min_alignment_bytes, leaves[leaf].element_bytes);
        CHECK(chunk.alignment_bytes % (alignment & (~alignment + 1)) == 0);
        CHECK((chunk.alignment_bytes & (chunk.alignment_bytes - 1)) == 0);
        CHECK(slot.offset % alignment == 0);
        CHECK(leaves[leaf].bytes <= kMaxPackedLeafBytes);
      }
      CHECK(slot.offset % leaves[leaf].element_bytes == 0);
    }
    CHECK(end == chunk.bytes);
    total += chunk.bytes;
  }
  for (const int count : seen) CHECK(count == 1);
  CHECK(packed == plan.packed_leaves);
  CHECK(total == plan.total_bytes);
}

CASE(small_leaves_share_one_chunk) {
  const std::vector<LeafExtent> leaves(528, {288, 4});
  const PackPlan plan = make_pack_plan(leaves, {});
  CHECK(plan.chunks.size() == 1);
  CHECK(plan.packed_leaves == 528);
  CHECK(plan.chunks[0].bytes == 528 * 288);
}

CASE(a_large_leaf_travels_alone_behind_the_packed_ones) {
  const PackPlan plan = make_pack_plan(
      std::vector<LeafExtent>{{kMaxPackedLeafBytes + 1, 1}, {kMaxPackedLeafBytes, 1}}, {});
  CHECK(plan.chunks.size() == 2);
  CHECK(plan.chunks[0].packed && plan.slots[1].chunk == 0);
  CHECK(!plan.chunks[1].packed && plan.slots[0].chunk == 1);
}

CASE(a_full_chunk_is_closed) {
  PackOptions options;
  options.max_chunk_bytes = 100;
  const PackPlan plan =
      make_pack_plan(std::vector<LeafExtent>{{60, 1}, {40, 1}, {101, 1}, {36, 1}}, options);
  // 60 + pad to 64 + 40 would be 104; the leaf of 101 bytes fits no chunk.
  CHECK(plan.chunks.size() == 3);
  CHECK(plan.slots[0].chunk == 0 && plan.slots[1].chunk == 1 && plan.slots[2].chunk == 2);
  CHECK(plan.slots[3].chunk == 1 && plan.slots[3].offset == 48);
}

CASE(without_packing_every_leaf_is_alone) {
  PackOptions options;
  options.pack = false;
  const PackPlan plan = make_pack_plan(std::vector<LeafExtent>{{8, 8}, {0, 4}}, options);
  CHECK(plan.chunks.size() == 2 && plan.packed_leaves == 0);
}

CASE(no_leaves_make_no_chunks) {
  CHECK(make_pack_plan({}, {}).chunks.empty());
}

CASE(alignment_is_rounded_up_to_the_element) {
  CHECK(slot_alignment_bytes(16, 4) == 16);
  CHECK(slot_alignment_bytes(1, 8) == 8);
  CHECK(slot_alignment_bytes(24, 16) == 32);
  CHECK(slot_alignment_bytes(10, 4) == 12);
}

CASE(odd_alignments_share_a_chunk_that_is_aligned_to_a_power_of_two) {
  PackOptions options;
  options.min_alignment_bytes = 1000003;
  const std::vector<LeafExtent> leaves{{8, 8}, {4, 4}, {2, 2}, {1, 1}};
  check_invariants(leaves, options);
  CHECK(make_pack_plan(leaves, options).chunks.size() == 1);
}

CASE(random_plans_keep_the_invariants) {
  std::mt19937 random(7);
  const uint32_t elements[] = {1, 2, 4, 8, 16};
  const uint64_t alignments[] = {1, 3, 16, 24, 64, 100, 512, 4096, 1000003};
  const uint64_t chunk_sizes[] = {1, 64, 1000, 65536, 33554432};
  for (int round = 0; round < 3000; ++round) {
    std::vector<LeafExtent> leaves(random() % 40);
    for (LeafExtent& leaf : leaves) {
      leaf.element_bytes = elements[random() % 5];
      const uint64_t count = random() % 20 == 0 ? random() % 300000 : random() % 300;
      leaf.bytes = leaf.element_bytes * count;
    }
    PackOptions options;
    options.pack = random() % 10 != 0;
    options.min_alignment_bytes = alignments[random() % 9];
    options.max_chunk_bytes = chunk_sizes[random() % 5];
    check_invariants(leaves, options);
  }
}

}  // namespace
}  // namespace pack_plan_test
