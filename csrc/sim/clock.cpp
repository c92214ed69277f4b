// A sorted vector suffices, because few streams are in use at a time.
#include "sim/clock.h"

#include <algorithm>
#include <functional>

namespace tdcopier::sim {

namespace {

constexpr auto kBefore = [](const auto& entry, const StreamQueue* stream) {
  return std::less<>()(entry.first, stream);
};

}  // namespace

std::uint64_t Clock::at(const StreamQueue* stream) const {
  const auto found = std::lower_bound(positions_.begin(), positions_.end(), stream, kBefore);
  return found != positions_.end() && found->first == stream ? found->second : 0;
}

void Clock::raise(const StreamQueue* stream, std::uint64_t position) {
  const auto found = std::lower_bound(positions_.begin(), positions_.end(), stream, kBefore);
  if (found != positions_.end() && found->first == stream) {
    found->second = std::max(found->second, position);
  } else {
    positions_.insert(found, {stream, position});
  }
}

void Clock::join(const Clock& other) {
  for (const auto& [stream, position] : other.positions_) raise(stream, position);
}

}  // namespace tdcopier::sim
