// What has happened before: for each stream, up to which position.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tdcopier::sim {

class StreamQueue;

// A vector clock over streams; streams that are not in it are at 0. Not locked.
class Clock {
 public:
  std::uint64_t at(const StreamQueue* stream) const;
  void raise(const StreamQueue* stream, std::uint64_t position);
  void join(const Clock& other);

 private:
  std::vector<std::pair<const StreamQueue*, std::uint64_t>> positions_;  // by stream
};

}  // namespace tdcopier::sim
