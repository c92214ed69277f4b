// A vector clock: for each stream, the position up to which its work has happened.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tdcopier::sim {

class StreamQueue;

// Streams that are not in the clock are at position 0. Not locked.
class Clock {
 public:
  std::uint64_t at(const StreamQueue* stream) const;
  void raise(const StreamQueue* stream, std::uint64_t position);
  void join(const Clock& other);

 private:
  std::vector<std::pair<const StreamQueue*, std::uint64_t>> positions_;  // sorted by stream
};

}  // namespace tdcopier::sim
