// Per-thread stacks of free blocks of one size.
#pragma once

#include <cstddef>
#include <new>

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
    if (mine.top == nullptr) return ::operator new(Bytes);
    Free* const block = mine.top;
    mine.top = block->next;
    --mine.count;
    return block;
  }

  static void give(void* block) noexcept {
    Stack& mine = stack_;
    if (mine.count >= kKept || mine.closed) return ::operator delete(block);
    if (mine.count == 0) close_at_end();
    mine.top = new (block) Free{mine.top};
    ++mine.count;
  }

 private:
  static_assert(Bytes >= sizeof(void*));
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kKept = 0;
#else
  static constexpr size_t kKept = MostKept;
#endif

  struct Free {
    Free* next;
  };
  // No destructor: blocks may be freed after the thread's other thread-local objects are gone.
  struct Stack {
    Free* top;
    size_t count;
    bool closed;
  };
  struct Closer {
    ~Closer() {
      Stack& mine = stack_;
      mine.closed = true;
      while (mine.top != nullptr) {
        Free* const block = mine.top;
        mine.top = block->next;
        ::operator delete(block);
      }
      mine.count = 0;
    }
  };
  static void close_at_end() {
    thread_local const Closer closer;
    static_cast<void>(closer);
  }

  static inline constinit thread_local Stack stack_{nullptr, 0, false};
};

}  // namespace tdcopier
