// Tests that recycled memory is reused, never handed out twice, and right for any size and thread.
#include "base/recycled.h"

#include <cstdint>
#include <set>
#include <thread>

#include "check.h"

using namespace tdcopier;

namespace recycled_test {
namespace {

CASE(a_freed_block_is_the_next_one_of_its_size) {
  void* first = allocate_block(5000);
  free_block(first, 5000);
  CHECK(allocate_block(8000) == first);  // both are rounded up to 8 KiB
  free_block(first, 8000);
}

CASE(live_blocks_are_distinct) {
  std::set<void*> seen;
  for (int i = 0; i < 100; ++i) CHECK(seen.insert(allocate_block(2048)).second);
  for (void* block : seen) free_block(block, 2048);
}

CASE(blocks_of_any_size_hold_what_was_asked_for) {
  for (const size_t bytes :
       {size_t{1}, size_t{1024}, size_t{1025}, size_t{1} << 20, (size_t{1} << 20) + 1}) {
    auto* block = static_cast<uint8_t*>(allocate_block(bytes));
    block[0] = 1;
    block[bytes - 1] = 2;
    free_block(block, bytes);
  }
}

CASE(vectors_grow_and_keep_their_values) {
  RecycledVector<int64_t> values;
  for (int64_t i = 0; i < 300000; ++i) values.push_back(i);
  for (int64_t i = 0; i < 300000; ++i) CHECK(values[static_cast<size_t>(i)] == i);
}

CASE(many_threads_share_the_store) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t] {
      for (int round = 0; round < 300; ++round) {
        RecycledVector<int> values(static_cast<size_t>(100 + round), t);
        for (const int value : values) CHECK(value == t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace recycled_test
