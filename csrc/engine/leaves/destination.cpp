// The table of destinations.
#include "engine/leaves/destination.h"

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

void DestinationTable::add_rows(std::byte* data, const c10::StorageImpl* storage, RowTable table,
                                const std::shared_ptr<const RowIndex>& index) {
  destinations_.push_back({data, storage, /*strided=*/true, /*pinned=*/false, 0,
                           static_cast<uint32_t>(row_tables_.size())});
  row_tables_.push_back(table);
  row_index_ = index;
}

}  // namespace tdcopier
