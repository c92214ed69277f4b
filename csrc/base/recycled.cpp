// Stacks of free blocks, one for each power of two.
#include "base/recycled.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <mutex>
#include <new>

namespace tdcopier {
namespace {

constexpr size_t kSmallestBytes = 1024;
constexpr size_t kLargestBytes = 1024 * 1024;
constexpr size_t kSizes = std::countr_zero(kLargestBytes) - std::countr_zero(kSmallestBytes) + 1;
constexpr size_t kKeptOfEach = 16;

struct Stack {
  std::array<void*, kKeptOfEach> blocks;
  size_t count = 0;
};

std::atomic<uint64_t> g_blocks_made = 0;

struct Store {
  std::mutex mutex;
  std::array<Stack, kSizes> stacks;  // guarded by mutex
};

Store& store();

Store* make_store() {
  auto* made = new Store();  // never destroyed: outlives every array
  // Hold the lock across fork(), so that no other thread holds it in the child's copy.
  pthread_atfork([] { store().mutex.lock(); }, [] { store().mutex.unlock(); },
                 [] { store().mutex.unlock(); });
  return made;
}

Store& store() {
  static Store* const made = make_store();
  return *made;
}

size_t rounded(size_t bytes) {
  return std::bit_ceil(std::max(bytes, kSmallestBytes));
}

size_t index_of(size_t rounded_bytes) {
  return std::countr_zero(rounded_bytes) - std::countr_zero(kSmallestBytes);
}

}  // namespace

void* allocate_block(size_t bytes) {
  if (bytes > kLargestBytes) {
    ++g_blocks_made;
    return ::operator new(bytes);
  }
  const size_t size = rounded(bytes);
  {
    const std::lock_guard lock(store().mutex);
    Stack& stack = store().stacks[index_of(size)];
    if (stack.count != 0) return stack.blocks[--stack.count];
  }
  ++g_blocks_made;
  return ::operator new(size);
}

uint64_t blocks_made() {
  return g_blocks_made;
}

void free_block(void* block, size_t bytes) noexcept {
  if (bytes <= kLargestBytes) {
    const std::lock_guard lock(store().mutex);
    Stack& stack = store().stacks[index_of(rounded(bytes))];
    if (stack.count != kKeptOfEach) {
      stack.blocks[stack.count++] = block;
      return;
    }
  }
  ::operator delete(block);
}

}  // namespace tdcopier
