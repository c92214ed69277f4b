#include "python/walk/known_layouts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "python/runtime/hooks.h"

namespace py = pybind11;

namespace tdcopier {

std::shared_ptr<const ParcelLayout> KnownLayouts::find(std::span<const std::byte> bytes) const {
  const Known& known = known_[place_of(bytes)];
  if (!known.layout || known.bytes.size() != bytes.size()) return nullptr;
  // Not std::ranges::equal, which compares std::byte one by one.
  if (std::memcmp(known.bytes.data(), bytes.data(), bytes.size()) != 0) return nullptr;
  std::shared_ptr<const ParcelLayout> layout = known.layout;
  const bool is_current =
      layout->classes.empty() || hooks().are_current(layout->classes).cast<bool>();
  return is_current ? layout : nullptr;
}

void KnownLayouts::keep(std::span<const std::byte> bytes,
                        std::shared_ptr<const ParcelLayout> layout) {
  if (bytes.size() > kMostKeptBytes) return;
  Known& known = known_[place_of(bytes)];
  const Known replaced = std::exchange(known, {{bytes.begin(), bytes.end()}, std::move(layout)});
  // Dropped last: that may run any code.
}

void KnownLayouts::clear() {
  const std::array<Known, kPlaces> dropped = std::exchange(known_, {});
}

// Each multiplication waits for the one before in its lane, so several lanes take less time.
size_t KnownLayouts::place_of(std::span<const std::byte> bytes) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
  std::array<uint64_t, 4> lanes{bytes.size(), 1, 2, 3};
  for (; bytes.size() >= sizeof(lanes); bytes = bytes.subspan(sizeof(lanes))) {
    std::array<uint64_t, 4> next;
    std::memcpy(next.data(), bytes.data(), sizeof(next));
    for (size_t i = 0; i < lanes.size(); ++i) {
      lanes[i] = (lanes[i] ^ next[i]) * kFactor;
      lanes[i] ^= lanes[i] >> 32;
    }
  }
  uint64_t hash = 0;
  for (const uint64_t lane : lanes) hash = (hash ^ lane) * kFactor;
  for (const std::byte byte : bytes) hash = hash * 31 + static_cast<uint64_t>(byte);
  return (hash ^ hash >> 32) * kFactor >> 32 & (kPlaces - 1);
}

}  // namespace tdcopier
