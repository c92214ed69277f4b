// Per-thread stacks of things that were used, for the next one who needs such a thing.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

namespace tdcopier {

// A stack of spare items for each thread, up to `MostKept`. An `Item` owns something, or is empty,
// as a default-made one is.
//
// Under the address sanitizer no item is kept, so that it finds uses after free.
//
// Thread: any; an item may be given by another thread than the one that took it. Each instantiation
// has its own stacks.
template <class Item, size_t MostKept>
class SpareStack {
 public:
  // Returns the item that was given last, or an empty one.
  static Item take() {
    Stack& mine = stack_;
    if (mine.count == 0) return {};
    return std::move(mine.items[--mine.count]);
  }

  // Returns the item that the call of take() after `ahead` others will return, or null.
  static const Item* later(size_t ahead) {
    const Stack& mine = stack_;
    return mine.count > ahead ? &mine.items[mine.count - 1 - ahead] : nullptr;
  }

  // Keeps the item, or drops it if there are enough.
  static void give(Item item) noexcept {
    Stack& mine = stack_;
    if (mine.count >= kKept || mine.closed) return;
    if (mine.items == nullptr && !open(mine)) return;
    mine.items[mine.count++] = std::move(item);
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kKept = 0;
#else
  static constexpr size_t kKept = MostKept;
#endif

  // An array, and not a list through the items, so that those of the next calls can be fetched:
  // after other work they are no longer in the cache.
  // No destructor: items may be given after the thread's other thread-local objects are gone.
  struct Stack {
    Item* items;  // (kKept,)
    size_t count;
    bool closed;
  };
  struct Closer {
    ~Closer() {
      Stack& mine = stack_;
      mine.closed = true;
      mine.count = 0;
      delete[] std::exchange(mine.items, nullptr);
    }
  };

  // Returns false if there is no memory.
  static bool open(Stack& mine) noexcept {
    thread_local const Closer closer;
    static_cast<void>(closer);
    mine.items = new (std::nothrow) Item[kKept];
    return mine.items != nullptr;
  }

  static inline constinit thread_local Stack stack_{nullptr, 0, false};
};

}  // namespace tdcopier
