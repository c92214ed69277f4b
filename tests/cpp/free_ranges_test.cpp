// Tests the best fit, how free ranges join, and which blocks are idle.
#include "base/free_ranges.h"

#include <algorithm>
#include <random>

#include "check.h"

using namespace tdcopier;

namespace free_ranges_test {
namespace {

// Blocks that touch each other, all of them free.
FreeRanges three_free_blocks() {
  FreeRanges ranges;
  for (const MemoryRange block : {MemoryRange{1000, 100}, {1100, 300}, {1400, 200}}) {
    ranges.add_block(block);
    ranges.give_back(block);
  }
  return ranges;
}

CASE(a_new_block_is_taken) {
  FreeRanges ranges;
  ranges.add_block({1000, 100});
  CHECK(ranges.free_bytes() == 0);
  CHECK(ranges.largest_free() == 0);
  CHECK(!ranges.take(1));
  CHECK(ranges.idle_blocks().empty());
}

CASE(the_smallest_range_that_fits_is_taken) {
  FreeRanges ranges = three_free_blocks();
  CHECK(ranges.take(150) == 1400);
  CHECK(ranges.take(50) == 1550);  // what remained of that block fits best
  CHECK(ranges.take(100) == 1000);
  CHECK(!ranges.take(301));
  CHECK(ranges.take(300) == 1100);
  CHECK(ranges.free_bytes() == 0);
}

CASE(parts_come_back_in_any_order) {
  FreeRanges ranges;
  ranges.add_block({1000, 300});
  ranges.add_block({1300, 100});
  ranges.give_back({1100, 100});
  ranges.give_back({1300, 100});
  CHECK(ranges.largest_free() == 100);
  CHECK(ranges.idle_blocks() == std::vector<MemoryRange>({{1300, 100}}));
  ranges.give_back({1200, 100});
  CHECK(ranges.largest_free() == 200);
  ranges.give_back({1000, 100});
  CHECK(ranges.largest_free() == 300);
  CHECK(ranges.free_bytes() == 400);
  CHECK(ranges.idle_blocks() == std::vector<MemoryRange>({{1000, 300}, {1300, 100}}));
}

CASE(an_idle_block_can_be_removed) {
  FreeRanges ranges = three_free_blocks();
  CHECK(ranges.take(10) == 1000);
  CHECK(ranges.idle_blocks() == std::vector<MemoryRange>({{1100, 300}, {1400, 200}}));
  ranges.remove_block(1100);
  CHECK(ranges.free_bytes() == 290);
  CHECK(!ranges.take(201));
  CHECK(ranges.take(200) == 1400);
}

CASE(random_leases_never_overlap_and_all_comes_back) {
  FreeRanges ranges = three_free_blocks();
  std::mt19937 random(7);
  std::vector<MemoryRange> taken;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const size_t bytes = 1 + random() % 40;
      if (const auto begin = ranges.take(bytes)) {
        for (const MemoryRange& other : taken) {
          CHECK(*begin >= other.end() || *begin + bytes <= other.begin);
        }
        taken.push_back({*begin, bytes});
      }
    } else if (!taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      ranges.give_back(taken.back());
      taken.pop_back();
    }
    size_t bytes = ranges.free_bytes();
    for (const MemoryRange& each : taken) bytes += each.bytes;
    CHECK(bytes == 600);
  }
  for (const MemoryRange& each : taken) ranges.give_back(each);
  CHECK(ranges.idle_blocks().size() == 3);
}

}  // namespace
}  // namespace free_ranges_test
