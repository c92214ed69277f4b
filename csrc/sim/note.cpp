// Looks up which allocator's memory an operation accesses.
#include "sim/note.h"

#include <c10/util/StringUtil.h>

#include <utility>

#include "sim/device_allocator.h"
#include "sim/pinned_allocator.h"
#include "sim/runtime.h"

namespace tdcopier::sim {

namespace {

std::string misuse_of(const Place& place, const Extent& extent, const std::string& memory) {
  if (!place.in_use) return memory + " that is free: its owner has freed it";
  const auto end = place.begin + place.size;
  if (extent.end() <= end) return {};
  return c10::str(memory, " up to ", extent.end() - end, " bytes beyond the end of its block of ",
                  place.size, " bytes");
}

Access access_to(Extent extent, bool writes, bool on_host) {
  const auto* const first = reinterpret_cast<const void*>(extent.begin());
  if (const auto place = DeviceAllocator::get().place_of(first)) {
    auto misuse = misuse_of(*place, extent, "device memory");
    return {std::move(extent), writes, /*on_host=*/false, place->begin, std::move(misuse)};
  }
  if (const auto place = PinnedAllocator::get().place_of(first)) {
    auto misuse = misuse_of(*place, extent, "pinned memory");
    return {std::move(extent), writes, /*on_host=*/true, place->begin, std::move(misuse)};
  }
  return {std::move(extent), writes, on_host, 0,
          on_host ? "" : "device memory that the device does not have, or no longer"};
}

}  // namespace

Access access_to(const at::Tensor& tensor, bool writes) {
  return access_to(Extent(tensor), writes, tensor.device().type() != kDeviceType);
}

Access access_to(const void* data, std::size_t bytes, bool writes) {
  return access_to(Extent(data, bytes), writes, /*on_host=*/true);
}

std::shared_ptr<Note> note_of(std::string label, Access read, Access write) {
  auto note = std::make_shared<Note>();
  note->label = std::move(label);
  note->accesses.push_back(std::move(read));
  note->accesses.push_back(std::move(write));
  return note;
}

}  // namespace tdcopier::sim
