// Who has touched which bytes of the allocators' blocks.
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

// An access of the past.
struct Past {
  std::shared_ptr<const Note> note;
  const Access* access;  // one of the note's
  const StreamQueue* stream;
  std::uint64_t position;
  std::uint64_t life;  // how often its block had been handed out

  bool is_before(const Clock& clock) const { return position <= clock.at(stream); }
};

// Accesses that the host knows to be done, and those that a later one stands for, are forgotten:
// what is not ordered after them is not ordered after that one either. Not locked.
class History {
 public:
  // Adds an access, which comes after what `before` says, its own stream included, and after what
  // the host knows. Reports the accesses of the same bytes that it is not ordered against.
  void add(const Past& now, const Clock& before, const Clock& host,
           const std::function<void(const Past& earlier)>& report);

  // The block is handed out: reports the accesses that `safe` does not hold for, and forgets them
  // and those that the allocator itself has waited for.
  void hand_out(std::uintptr_t block, const std::function<bool(const Past&)>& safe,
                const Clock* waited_for, const std::function<void(const Past&)>& report);
  std::uint64_t life_of(std::uintptr_t block) const;

  // The block is no more.
  void forget(std::uintptr_t block) { blocks_.erase(block); }
  void clear() { blocks_.clear(); }

 private:
  struct Life {
    std::uint64_t number = 0;
    std::vector<Past> accesses;  // oldest first
  };
  std::unordered_map<std::uintptr_t, Life> blocks_;
};

}  // namespace tdcopier::sim
