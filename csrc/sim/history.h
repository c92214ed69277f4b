// The accesses that operations have made to the bytes of the allocators' blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "sim/clock.h"
#include "sim/note.h"

namespace tdcopier::sim {

class StreamQueue;

// A past access.
struct PastAccess {
  std::shared_ptr<const Note> note;
  const Access* access;  // one of those in `note`
  const StreamQueue* stream;
  std::uint64_t position;
  std::uint64_t life;  // how many times its block had been handed out

  bool is_before(const Clock& clock) const { return position <= clock.at(stream); }
};

// The past accesses of each block. Forgets an access once the host knows that it is done, or once a
// later access covers it: work that is not ordered after the first is not ordered after the second
// either. Not locked.
class History {
 public:
  // Adds an access that happens after the work in `before` (its own stream's included) and in
  // `host`. Reports earlier accesses to the same bytes that are not ordered before it.
  void add(const PastAccess& now, const Clock& before, const Clock& host,
           const std::function<void(const PastAccess& earlier)>& report);

  // Records that the block is handed out. Reports the accesses for which `safe` is false, and
  // forgets them and those that the allocator itself has waited for.
  void hand_out(std::uintptr_t block, const std::function<bool(const PastAccess&)>& safe,
                const Clock* waited_for, const std::function<void(const PastAccess&)>& report);
  std::uint64_t life_of(std::uintptr_t block) const;

  // Forgets a block that went back to the system.
  void forget(std::uintptr_t block) { blocks_.erase(block); }
  void clear() { blocks_.clear(); }

 private:
  struct Life {
    std::uint64_t number = 0;
    std::vector<PastAccess> accesses;  // oldest first
  };
  std::unordered_map<std::uintptr_t, Life> blocks_;
};

}  // namespace tdcopier::sim
