// Keeps the free ranges sorted by address, to join them, and by size, to find the best fit.
#include "base/free_ranges.h"

#include <iterator>

namespace tdcopier {

void FreeRanges::insert(MemoryRange range) {
  by_size_.emplace(range.bytes, range.begin);
  free_.emplace(range.begin, range.bytes);
  free_bytes_ += range.bytes;
}

void FreeRanges::erase(std::map<uintptr_t, size_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  free_bytes_ -= range->second;
  free_.erase(range);
}

void FreeRanges::add_block(MemoryRange block) {
  blocks_.emplace(block.begin, block.bytes);
}

void FreeRanges::remove_block(uintptr_t begin) {
  erase(free_.find(begin));
  blocks_.erase(begin);
}

std::optional<uintptr_t> FreeRanges::take(size_t bytes) {
  const auto best = by_size_.lower_bound({bytes, 0});
  if (best == by_size_.end()) return std::nullopt;
  const auto [size, begin] = *best;
  erase(free_.find(begin));
  if (size != bytes) insert({begin + bytes, size - bytes});
  return begin;
}

void FreeRanges::give_back(MemoryRange range) {
  const auto block = std::prev(blocks_.upper_bound(range.begin));
  const auto after = free_.find(range.end());
  if (after != free_.end() && range.end() != block->first + block->second) {
    range.bytes += after->second;
    erase(after);
  }
  const auto next = free_.lower_bound(range.begin);
  if (next != free_.begin() && range.begin != block->first) {
    const auto before = std::prev(next);
    if (before->first + before->second == range.begin) {
      range = {before->first, before->second + range.bytes};
      erase(before);
    }
  }
  insert(range);
}

std::vector<MemoryRange> FreeRanges::idle_blocks() const {
  std::vector<MemoryRange> idle;
  for (const auto& [begin, bytes] : blocks_) {
    const auto found = free_.find(begin);
    if (found != free_.end() && found->second == bytes) idle.push_back({begin, bytes});
  }
  return idle;
}

}  // namespace tdcopier
