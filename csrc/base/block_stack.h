// Small blocks of one size that a thread keeps for its next objects.
#pragma once

#include <cstddef>
#include <new>

namespace tdcopier {

// A stack of free blocks for each thread: what a batch has left is what the next one takes, still
// in the cache. The C library would join such blocks to their neighbours when they are freed and
// cut them off again when the next batch comes.
//
// Under the address sanitizer nothing is kept, so that it sees who uses what was freed.
//
// Thread: any; a block may be freed by another thread than took it. `Bytes` names the stack, so
// each kind of object has its own.
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
  // No destructor: objects may be freed when a thread's others have gone.
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
