// Per-thread stacks of free blocks of one size.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "base/cache_line.h"
#include "base/spare_stack.h"

namespace tdcopier {

// The next batch takes the blocks that the last one freed, which are still in the cache. The C
// library would merge such blocks with their neighbours when they are freed, and split them again
// for the next batch.
template <size_t Bytes, size_t MostKept>
class BlockStack {
 public:
  static void* take() {
    Block block = Blocks::take();
    if (const Block* later = Blocks::later(kAhead)) prefetch(later->get());
    return block ? block.release() : ::operator new(Bytes);
  }

  static void give(void* block) noexcept { Blocks::give(Block(block)); }

 private:
  struct Free {
    void operator()(void* block) const noexcept { ::operator delete(block); }
  };
  using Block = std::unique_ptr<void, Free>;
  using Blocks = SpareStack<Block, MostKept>;

  static constexpr size_t kAhead = 7;
  TDCOPIER_PREFETCH static void prefetch(void* block) { prefetch_lines<Use::kWrite>(block, Bytes); }
};

}  // namespace tdcopier
