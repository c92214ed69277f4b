#include "python/walk/known_layouts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "python/runtime/hooks.h"

namespace py = pybind11;

namespace tdcopier {

std::shared_ptr<const ParcelLayout> KnownLayouts::find(std::span<const std::byte> bytes) const {
  const Known& known = known_[place_of(bytes)];
  if (!known.layout || !std::ranges::equal(known.bytes, bytes)) return nullptr;
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

size_t KnownLayouts::place_of(std::span<const std::byte> bytes) {
  uint64_t hash = bytes.size();
  for (; bytes.size() >= sizeof(uint64_t); bytes = bytes.subspan(sizeof(uint64_t))) {
    uint64_t next = 0;
    std::memcpy(&next, bytes.data(), sizeof(next));
    hash = (hash ^ next) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  }
  for (const std::byte byte : bytes) hash = hash * 31 + static_cast<uint64_t>(byte);
  return hash % kPlaces;
}

}  // namespace tdcopier
