// Tests that blocks and other items are reused, up to the limit, and freed when their thread ends.
#include "base/block_stack.h"

#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

using tdcopier::BlockStack;
using tdcopier::SpareStack;

namespace block_stack_test {
namespace {

CASE(what_was_given_last_is_taken_first) {
  using Blocks = BlockStack<64, 8>;
  void* const first = Blocks::take();
  void* const second = Blocks::take();
  CHECK(first != second);
  Blocks::give(first);
  Blocks::give(second);
#ifndef __SANITIZE_ADDRESS__
  CHECK(Blocks::take() == second);
  CHECK(Blocks::take() == first);
  Blocks::give(first);
  Blocks::give(second);
#endif
}

CASE(no_block_is_given_out_twice) {
  using Blocks = BlockStack<32, 4>;
  std::vector<void*> taken;
  for (int i = 0; i < 20; ++i) taken.push_back(Blocks::take());
  for (void* block : taken) Blocks::give(block);  // more than are kept
  std::set<void*> again;
  for (int i = 0; i < 20; ++i) CHECK(again.insert(Blocks::take()).second);
  for (void* block : again) Blocks::give(block);
}

// The sanitizers report leaks, double frees and races.
CASE(threads_take_and_give_each_others) {
  using Blocks = BlockStack<48, 16>;
  std::vector<void*> passed;
  std::thread([&] {
    for (int i = 0; i < 40; ++i) passed.push_back(Blocks::take());
  }).join();
  for (void* block : passed) Blocks::give(block);
  std::thread([] {
    for (int i = 0; i < 10; ++i) Blocks::give(Blocks::take());
  }).join();
}

// Counts those that are owned.
struct Counted {
  static inline int alive = 0;
  int number = 0;  // 0: empty

  Counted() = default;
  explicit Counted(int which) : number(which) { ++alive; }
  Counted(Counted&& other) noexcept : number(std::exchange(other.number, 0)) {}
  Counted& operator=(Counted&& other) noexcept {
    std::swap(number, other.number);
    return *this;
  }
  ~Counted() { alive -= number != 0; }
};

CASE(items_are_dropped_beyond_the_limit_and_with_their_thread) {
  using Items = SpareStack<Counted, 4>;
  std::thread([] {
    CHECK(Items::take().number == 0);
    for (int i = 1; i <= 6; ++i) Items::give(Counted(i));
#ifdef __SANITIZE_ADDRESS__
    CHECK(Counted::alive == 0);
#else
    CHECK(Counted::alive == 4);
    CHECK(Items::later(0)->number == 4);
    CHECK(Items::later(3)->number == 1);
    CHECK(Items::later(4) == nullptr);
    CHECK(Items::take().number == 4);
    CHECK(Counted::alive == 3);
#endif
  }).join();
  CHECK(Counted::alive == 0);
}

}  // namespace
}  // namespace block_stack_test
