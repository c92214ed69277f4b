// Keeps the layouts that were read last: those of batches of fixed shapes are equal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "python/walk/parcel_layout.h"

namespace tdcopier {

// By their bytes, each in the place that its hash gives. GIL: held for every member.
class KnownLayouts {
 public:
  // Never freed: its layouts have Python objects.
  static KnownLayouts& get() {
    static auto* const known = new KnownLayouts();
    return *known;
  }

  // Returns null for bytes that are not known, or whose classes have been defined again.
  std::shared_ptr<const ParcelLayout> find(std::span<const std::byte> bytes) const;
  // Call it when a class is registered or unregistered.
  void clear();
  // Not a long one.
  void keep(std::span<const std::byte> bytes, std::shared_ptr<const ParcelLayout> layout);

 private:
  struct Known {
    std::vector<std::byte> bytes;
    std::shared_ptr<const ParcelLayout> layout;
  };
  static constexpr size_t kPlaces = 64;  // a power of two
  static constexpr size_t kMostKeptBytes = 64 * 1024;

  static size_t place_of(std::span<const std::byte> bytes);

  std::array<Known, kPlaces> known_;
};

}  // namespace tdcopier
