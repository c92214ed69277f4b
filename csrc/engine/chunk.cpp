// Alignment beyond what an allocator gives is reached by a shift within a larger block.
#include "engine/chunk.h"

#include <utility>

#include "base/internal_error.h"

namespace tdcopier {
namespace {

constexpr uint64_t kMostElementBytes = 16;
constexpr uint64_t kAllocatorAlignmentBytes = 64;  // what every allocator of torch gives

}  // namespace

Chunk allocate_chunk(c10::Allocator* allocator, c10::Device device, const ChunkPlan& plan) {
  const uint64_t alignment = plan.alignment_bytes;
  const bool aligned = kAllocatorAlignmentBytes % alignment == 0;
  // torch saves and loads whole elements of a storage, of whatever dtype its leaves are.
  const uint64_t total = (plan.bytes + (aligned ? 0 : alignment - 1) + kMostElementBytes - 1) &
                         ~(kMostElementBytes - 1);
  c10::DataPtr memory = allocator->allocate(total);
  check_invariant(memory.device().type() == device.type(), "an allocator serves its own device");
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  const uint64_t shift = aligned ? 0 : (alignment - address % alignment) % alignment;
  check_invariant((address + shift) % alignment == 0, "allocators align memory to 64 bytes");
  return {{c10::Storage::use_byte_size_t(), static_cast<size_t>(total), std::move(memory),
           allocator, /*resizable=*/true},
          shift};
}

}  // namespace tdcopier
