// Memory blocks that are kept for reuse: the common part of the device's and the pinned allocator.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "sim/clock.h"
#include "sim/stream_queue.h"

namespace tdcopier::sim {

// Says when memory is filled with a pattern that no test mistakes for data.
struct Poison {
  bool at_allocation;  // of fresh system memory
  bool at_free;
};
// Sets the poison for all blocks from now on, and returns the previous setting. Thread: any.
Poison exchange_poison(Poison poison);

inline constexpr std::size_t kBlockBytes = 512;  // block addresses and sizes are multiples of this

std::size_t rounded_size(std::size_t bytes);

// A piece of system memory. A free block is reused only within its `pool`.
struct Block {
  void* data = nullptr;
  std::size_t size = 0;
  std::int64_t pool = 0;
  StreamQueue* owner = nullptr;     // the stream in whose order the block is reused; null: none
  Point freed_at;                   // the owner's position at the free
  std::vector<StreamQueue*> users;  // streams recorded as users while the block is handed out
  std::vector<Point> in_use_until;  // after the free: may be reused once these are passed
  std::vector<Point> seen_until;    // after the free: may be unmapped once these are passed
  bool in_use = false;              // handed out
  std::shared_ptr<const Clock> done_at_free;  // for a detection: in_use_until as a clock
};

// The block that contains an address.
struct Place {
  std::uintptr_t begin;  // of the block
  std::size_t size;
  bool in_use;
};

// Ends a forked child that frees a block on which streams were recorded, as CUDA does: to free it
// would be to record events on them. Other blocks stay as they are, which costs the child nothing.
void check_freed_in_child(const Block& block);

// Not locked: its owner's mutex guards it.
//
// A freed block can be reused at once, even if work is pending: work of the stream that owns it
// runs before the next user's anyway. But if streams were recorded as its users, it waits until the
// work that was enqueued on them at the time of the free has run.
//
// A freed block is poisoned when its owner may reuse it: at once if the owner has run all work from
// before the free, else in the owner's order. A read that sees the pattern is a use after free.
//
// Memory goes back to the system only when all work that was pending at the free, on any stream,
// has run. So a program that forgets to order its streams sees wrong bytes, but never crashes.
class BlockCache {
 public:
  // Returns a free block of exactly this rounded size, the most recently freed first; null if there
  // is none.
  Block* reuse(std::int64_t pool, std::size_t size);

  // Returns a new, poisoned block from the system; null if the system has no memory.
  Block* allocate(std::int64_t pool, std::size_t size);

  void recycle(Block* block);

  // Gives the free blocks for which `wanted(pool)` is true back to the system, except those that
  // pending work may still touch. Returns the number of bytes.
  template <typename Wanted>
  std::size_t trim(Wanted wanted) {
    sweep();
    std::size_t bytes = 0;
    for (auto& [key, blocks] : free_) {
      if (!wanted(key.first)) continue;
      std::erase_if(blocks, [&](Block* block) {
        if (!all_passed(block->seen_until)) return false;
        bytes += block->size;
        forget(block);
        return true;
      });
    }
    return bytes;
  }

  // Returns the work after which trim() would give all free blocks back for which `wanted(pool)`.
  template <typename Wanted>
  std::vector<Point> pending_uses(Wanted wanted) const {
    std::vector<Point> points;
    const auto add = [&points](const Block* block) {
      points.insert(points.end(), block->in_use_until.begin(), block->in_use_until.end());
      points.insert(points.end(), block->seen_until.begin(), block->seen_until.end());
    };
    for (const Block* block : waiting_) {
      if (wanted(block->pool)) add(block);
    }
    for (const auto& [key, blocks] : free_) {
      if (wanted(key.first)) std::for_each(blocks.begin(), blocks.end(), add);
    }
    std::erase_if(points, [](const Point& point) { return point.passed(); });
    return points;
  }

  // Return the block that starts at an address, or the one that contains it; null if there is none.
  Block* starting_at(const void* data) const;
  Block* containing(const void* data) const;
  std::optional<Place> place_of(const void* data) const;

 private:
  static bool all_passed(std::vector<Point>& points);
  void sweep();
  static void poison(Block* block);
  void forget(Block* block);

  std::map<std::uintptr_t, std::unique_ptr<Block>> blocks_;
  std::map<std::pair<std::int64_t, std::size_t>, std::vector<Block*>> free_;
  std::list<Block*> waiting_;  // freed, but still in use by recorded streams
};

}  // namespace tdcopier::sim
