// Per-thread stacks of free blocks of one size.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include "base/cache_line.h"

namespace tdcopier {

// A stack of free blocks for each thread. The next batch takes the blocks that the last one freed,
// which are still in the cache. The C library would merge such blocks with their neighbours when
// they are freed, and split them again for the next batch.
//
// Under the address sanitizer no block is kept, so that it finds uses after free.
//
// Thread: any; a block may be freed by another thread than the one that took it. Each instantiation
// has its own stacks.
template <size_t Bytes, size_t MostKept>
class BlockStack {
 public:
  static void* take() {
    Stack& mine = stack_;
    if (mine.count == 0) return ::operator new(Bytes);
    --mine.count;
    if (mine.count >= kAhead) prefetch(mine.blocks[mine.count - kAhead]);
    return mine.blocks[mine.count];
  }

  static void give(void* block) noexcept {
    Stack& mine = stack_;
    if (mine.count >= kKept || mine.closed) return ::operator delete(block);
    if (mine.blocks == nullptr && !open(mine)) return ::operator delete(block);
    mine.blocks[mine.count++] = block;
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kKept = 0;
#else
  static constexpr size_t kKept = MostKept;
#endif

  // An array, and not a list through the blocks, so that the blocks of the next calls can be
  // fetched: after other work they are no longer in the cache.
  // No destructor: blocks may be freed after the thread's other thread-local objects are gone.
  struct Stack {
    void** blocks;  // (kKept,)
    size_t count;
    bool closed;
  };
  struct Closer {
    ~Closer() {
      Stack& mine = stack_;
      mine.closed = true;
      for (size_t i = 0; i < mine.count; ++i) ::operator delete(mine.blocks[i]);
      mine.count = 0;
      delete[] std::exchange(mine.blocks, nullptr);
    }
  };

  static constexpr size_t kAhead = 8;
  TDCOPIER_PREFETCH static void prefetch(void* block) { prefetch_lines<Use::kWrite>(block, Bytes); }

  // Returns false if there is no memory.
  static bool open(Stack& mine) noexcept {
    thread_local const Closer closer;
    static_cast<void>(closer);
    mine.blocks = new (std::nothrow) void*[kKept];
    return mine.blocks != nullptr;
  }

  static inline constinit thread_local Stack stack_{nullptr, 0, false};
};

}  // namespace tdcopier
