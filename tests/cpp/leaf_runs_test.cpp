// Tests runs: leaves that are laid out in memory like the slots of one chunk.
#include <random>

#include "base/pack_plan.h"
#include "check.h"

using namespace tdcopier;

namespace leaf_runs_test {
namespace {

constexpr uint64_t kKiB = 1024;

// Leaves that follow one another in memory.
struct Memory {
  std::vector<LeafExtent> leaves;
  std::vector<uintptr_t> addresses;
  uintptr_t end = 4096;

  void add(uint64_t bytes, uint32_t element_bytes = 4, uint64_t gap_bytes = 0) {
    addresses.push_back(end + gap_bytes);
    leaves.push_back({bytes, element_bytes});
    end = addresses.back() + bytes;
  }
  LeafSeries all() const { return {0, static_cast<uint32_t>(leaves.size())}; }
  std::vector<LeafSeries> runs(const PackOptions& options = {}) const {
    return find_runs(leaves, addresses, std::vector<LeafSeries>{all()}, options);
  }
};

Memory rows(uint32_t count, uint64_t bytes, uint64_t gap_bytes = 0) {
  Memory memory;
  for (uint32_t i = 0; i < count; ++i) memory.add(bytes, 4, i == 0 ? 0 : gap_bytes);
  return memory;
}

bool are(const std::vector<LeafSeries>& runs, std::initializer_list<LeafSeries> expected) {
  return std::equal(runs.begin(), runs.end(), expected.begin(), expected.end(),
                    [](const LeafSeries& a, const LeafSeries& b) {
                      return a.first == b.first && a.last == b.last;
                    });
}

CASE(leaves_that_adjoin_are_a_run) {
  CHECK(are(rows(100, 4 * kKiB).runs(), {{0, 100}}));
}

CASE(what_is_no_larger_than_a_packed_leaf_is_none) {
  CHECK(are(rows(64, 4 * kKiB).runs(), {}));
  CHECK(are(rows(65, 4 * kKiB).runs(), {{0, 65}}));
}

CASE(a_gap_is_what_padding_would_be) {
  CHECK(are(rows(100, 4092, 4).runs(), {{0, 100}}));
  CHECK(are(rows(100, 4084, 12).runs(), {{0, 100}}));
  CHECK(are(rows(100, 4080, 16).runs(), {}));
  CHECK(are(rows(100, 4084, 28).runs(), {}));
  PackOptions options;
  options.min_alignment_bytes = 32;
  CHECK(are(rows(100, 4080, 16).runs(options), {{0, 100}}));
}

CASE(slots_would_be_unaligned_elsewhere) {
  CHECK(are(rows(200, 4092).runs(), {}));
  CHECK(are(rows(200, 4092, 8).runs(), {}));
  PackOptions options;
  options.min_alignment_bytes = 4;
  CHECK(are(rows(200, 4092).runs(options), {{0, 200}}));
  options.min_alignment_bytes = 8192;
  CHECK(are(rows(200, 4096).runs(options), {}));
}

CASE(a_run_ends_where_leaves_lie_elsewhere) {
  Memory memory = rows(100, 4 * kKiB);
  memory.add(4 * kKiB, 4, 4 * kKiB);
  for (int i = 1; i < 100; ++i) memory.add(4 * kKiB);
  CHECK(are(memory.runs(), {{0, 100}, {100, 200}}));
  memory.addresses[150] = memory.addresses[20];
  CHECK(are(memory.runs(), {{0, 100}}));
}

CASE(a_large_leaf_is_in_no_run) {
  Memory memory = rows(70, 4 * kKiB);
  memory.add(kMaxPackedLeafBytes + 4);
  memory.add(kMaxPackedLeafBytes, 4, 12);
  memory.add(kMaxPackedLeafBytes);
  CHECK(are(memory.runs(), {{0, 70}, {71, 73}}));
}

CASE(a_run_is_cut_where_a_chunk_is_full) {
  PackOptions options;
  options.max_chunk_bytes = 75 * 4 * kKiB + 100;
  CHECK(are(rows(200, 4 * kKiB).runs(options), {{0, 75}, {75, 150}}));
  options.max_chunk_bytes = kMaxPackedLeafBytes;
  CHECK(are(rows(200, 4 * kKiB).runs(options), {}));
}

CASE(without_packing_there_is_none) {
  PackOptions options;
  options.pack = false;
  CHECK(are(rows(200, 4 * kKiB).runs(options), {}));
}

CASE(empty_leaves_may_be_anywhere) {
  Memory memory = rows(100, 4 * kKiB);
  memory.leaves[0].bytes = memory.leaves[99].bytes = 0;
  for (uint32_t i = 40; i < 60; i += 2) {
    memory.leaves.insert(memory.leaves.begin() + i, {0, 8});
    memory.addresses.insert(memory.addresses.begin() + i, 0);
  }
  CHECK(are(memory.runs(), {{1, 109}}));
}

CASE(leaves_of_two_kinds_are_in_no_run_together) {
  Memory memory = rows(200, 4 * kKiB);
  for (uint32_t i = 100; i < 200; ++i) memory.leaves[i].kind = 1;
  CHECK(are(memory.runs(), {{0, 100}, {100, 200}}));
  for (uint32_t i = 0; i < 200; ++i) memory.leaves[i].kind = i % 2;
  CHECK(are(memory.runs(), {}));
}

CASE(series_are_looked_at_one_by_one) {
  const Memory memory = rows(300, 4 * kKiB);
  const std::vector<LeafSeries> series{{10, 110}, {110, 120}, {150, 250}};
  CHECK(are(find_runs(memory.leaves, memory.addresses, series, {}), {{10, 110}, {150, 250}}));
}

// Checks, for any leaves, that the slots of a run's chunk are laid out like its leaves, and that
// the other leaves are planned as if the run's were not there.
void check_plan(const Memory& memory, const PackOptions& options) {
  const std::vector<LeafSeries> runs = memory.runs(options);
  const PackPlan plan = make_pack_plan(memory.leaves, options, runs);
  CHECK(plan.order.size() == memory.leaves.size());
  std::vector<int> seen(memory.leaves.size());
  uint64_t total = 0;
  for (uint32_t c = 0; c < plan.chunks.size(); ++c) {
    const ChunkPlan& chunk = plan.chunks[c];
    CHECK(chunk.as_source == (c < runs.size()));
    CHECK(chunk.pinned == chunk.as_source);
    CHECK(chunk.last > chunk.first);
    CHECK(!chunk.as_source || chunk.bytes > kMaxPackedLeafBytes);
    CHECK(!chunk.packed || chunk.bytes <= options.max_chunk_bytes);
    total += chunk.bytes;
    uint64_t end = 0;
    for (uint32_t i = chunk.first; i < chunk.last; ++i) {
      const uint32_t leaf = plan.order[i];
      const Slot& slot = plan.slots[leaf];
      ++seen[leaf];
      CHECK(slot.chunk == c && slot.offset >= end);
      end = slot.offset + memory.leaves[leaf].bytes;
      if (!chunk.packed) continue;
      const uint64_t alignment =
          slot_alignment_bytes(options.min_alignment_bytes, memory.leaves[leaf].element_bytes);
      CHECK(slot.offset % alignment == 0);
      CHECK(chunk.alignment_bytes % (alignment & (~alignment + 1)) == 0);
      if (!chunk.as_source) continue;
      CHECK(runs[c].first <= leaf && leaf < runs[c].last);
      const uint32_t first = plan.order[chunk.first];
      CHECK(memory.addresses[leaf] - memory.addresses[first] == slot.offset);
    }
    CHECK(end == chunk.bytes);
  }
  for (const int count : seen) CHECK(count == 1);
  CHECK(total == plan.total_bytes);

  const auto is_in_run = [&](uint32_t leaf) {
    for (const LeafSeries& run : runs) {
      if (run.first <= leaf && leaf < run.last) return memory.leaves[leaf].bytes != 0;
    }
    return false;
  };
  std::vector<LeafExtent> rest;
  for (uint32_t leaf = 0; leaf < memory.leaves.size(); ++leaf) {
    if (!is_in_run(leaf)) rest.push_back(memory.leaves[leaf]);
  }
  const PackPlan without = make_pack_plan(rest, options);
  CHECK(without.chunks.size() + runs.size() == plan.chunks.size());
  uint32_t at = 0;
  for (uint32_t leaf = 0; leaf < memory.leaves.size(); ++leaf) {
    if (is_in_run(leaf)) continue;
    CHECK(plan.slots[leaf].chunk == without.slots[at].chunk + runs.size());
    CHECK(plan.slots[leaf].offset == without.slots[at].offset);
    ++at;
  }
}

CASE(random_leaves_keep_the_invariants) {
  std::mt19937 random(11);
  const uint32_t elements[] = {1, 2, 4, 8, 16};
  const uint64_t alignments[] = {1, 3, 16, 24, 64, 4096};
  const uint64_t chunk_sizes[] = {1000, 300000, 1 << 20, 1 << 25};
  size_t found = 0;
  for (int round = 0; round < 3000; ++round) {
    Memory memory;
    const bool is_tidy = random() % 2 == 0;
    const auto leaves = 20 + random() % 60;
    for (uint32_t i = 0; i < leaves; ++i) {
      const uint32_t element_bytes = elements[random() % 5];
      uint64_t bytes = element_bytes * (random() % (is_tidy ? 3000 : 20000));
      if (random() % 10 == 0) bytes = 0;
      if (random() % 40 == 0) bytes = 300000 / element_bytes * element_bytes;
      uint64_t gap = random() % 30 == 0 ? random() % 100 : 0;
      if (is_tidy && random() % 40 != 0) gap = (16 - memory.end % 16) % 16;
      memory.add(bytes, element_bytes, gap);
    }
    PackOptions options;
    options.pack = random() % 20 != 0;
    options.min_alignment_bytes = alignments[random() % 6];
    options.max_chunk_bytes = chunk_sizes[random() % 4];
    check_plan(memory, options);
    found += memory.runs(options).size();
  }
  CHECK(found > 1000);
}

}  // namespace
}  // namespace leaf_runs_test
