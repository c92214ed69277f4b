// Memory blocks that are kept for reuse: what the device's and the pinned allocator have in common.
#pragma once

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

// When memory is filled with a pattern that no test takes for data.
struct Poison {
  bool at_allocation;  // of memory that is fresh from the system
  bool at_free;
};
// For all blocks from now on; returns what was. Thread: any.
Poison exchange_poison(Poison poison);

inline constexpr std::size_t kBlockBytes = 512;  // blocks are aligned to and multiples of this

std::size_t rounded_size(std::size_t bytes);

// A piece of system memory. `pool` says among whom a free block may be shared.
struct Block {
  void* data = nullptr;
  std::size_t size = 0;
  std::int64_t pool = 0;
  StreamQueue* owner = nullptr;     // in whose order the block is used again; none: in no stream's
  Point freed_at;                   // the owner's place at the free
  std::vector<StreamQueue*> users;  // streams that were noted to use the block while handed out
  std::vector<Point> in_use_until;  // freed, and to be reused only when all of these are passed
  std::vector<Point> seen_until;    // freed, and to be unmapped only when all of these are passed
  bool in_use = false;              // handed out
  std::shared_ptr<const Clock> done_at_free;  // for a detection: what in_use_until stands for
};

// Where an address lies.
struct Place {
  std::uintptr_t begin;  // of its block
  std::size_t size;
  bool in_use;
};

// Not locked: its owner's mutex guards it.
//
// A freed block goes to the back of its pool's free list at once, whatever work is pending (work of
// the stream that owns it is ordered before the next user's anyway), unless streams were noted as
// its users: then it waits until what was enqueued on them at the time of the free has run.
//
// A freed block is poisoned when its owner may use it again: at once if no stream that may has
// pending work, else in the owner's order. Who reads it after that reads it after its free.
//
// Memory goes back to the system only when all work that was pending at the free, on any stream,
// has run. A program that forgets to order its streams therefore sees wrong bytes, never a crash.
class BlockCache {
 public:
  // A free block of exactly this rounded size, the most recently freed first; null if there is
  // none.
  Block* reuse(std::int64_t pool, std::size_t size);

  // A new block from the system, poisoned; null if the system has no memory.
  Block* allocate(std::int64_t pool, std::size_t size);

  void recycle(Block* block);

  // Gives free blocks back to the system, those for which `wanted(pool)` is true, as far as no
  // pending work may still touch them. Returns the number of bytes.
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

  // The block that starts at an address, or that an address lies in; null if there is none.
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
  std::list<Block*> waiting_;  // freed, with users that are not done
};

}  // namespace tdcopier::sim
