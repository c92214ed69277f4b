// Which parts of a set of memory blocks are free, and the best fit among them. Accesses no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace tdcopier {

struct MemoryRange {
  uintptr_t begin;
  size_t bytes;
  uintptr_t end() const { return begin + bytes; }
  friend bool operator==(const MemoryRange&, const MemoryRange&) = default;
};

// Free ranges of one block that touch become one; those of different blocks never do. Thread: one
// at a time.
class FreeRanges {
 public:
  // Adds a block, all of it taken. Blocks do not overlap.
  void add_block(MemoryRange block);
  // Requires: the block is idle.
  void remove_block(uintptr_t begin);

  // Takes `bytes` from the beginning of the smallest free range that has as many.
  std::optional<uintptr_t> take(size_t bytes);
  // Frees a part of a block. Requires: all of it is taken.
  void give_back(MemoryRange range);

  // Returns the blocks that are wholly free, by address.
  std::vector<MemoryRange> idle_blocks() const;
  size_t free_bytes() const { return free_bytes_; }
  size_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  void insert(MemoryRange range);
  void erase(std::map<uintptr_t, size_t>::iterator range);

  std::map<uintptr_t, size_t> blocks_;              // sizes by beginning
  std::map<uintptr_t, size_t> free_;                // sizes by beginning
  std::set<std::pair<size_t, uintptr_t>> by_size_;  // the same ranges
  size_t free_bytes_ = 0;
};

}  // namespace tdcopier
