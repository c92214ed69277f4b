// The table of destinations.
#include "engine/destination.h"

namespace tdcopier {

void DestinationTable::add(std::byte* data, const c10::StorageImpl* storage, bool pinned) {
  destinations_.push_back({data, storage, /*strided=*/false, pinned, 0});
}

void DestinationTable::add_strided(std::byte* data, const c10::StorageImpl* storage,
                                   std::span<const int64_t> strides_bytes) {
  destinations_.push_back({data, storage, /*strided=*/true, /*pinned=*/false,
                           static_cast<uint32_t>(strides_bytes_.size())});
  for (const int64_t stride : strides_bytes) strides_bytes_.push_back(stride);
}

}  // namespace tdcopier
