// Many segments moved on a CUDA device by one kernel.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// Bytes of a leaf, and their slot in a chunk. As in kernels/move_segments.cu.
struct Segment {
  uint64_t address;          // on the device
  uint32_t offset;           // of the slot in its chunk
  uint32_t chunk_and_bytes;  // the chunk's number among those of a launch, in the upper 8 bits
};
inline constexpr size_t kMostChunksOfLaunch = 8;

enum class Move : uint32_t {
  kGather = 0,   // from the addresses to the slots
  kScatter = 1,  // from the slots to the addresses
};

// The leaves' bytes and their slots, cut: each segment is the work of one block of threads.
class Segments {
 public:
  explicit Segments(size_t leaves) { segments_.reserve(leaves); }

  // What is added from here on has its slots in this chunk.
  void begin_chunk(std::byte* memory);
  // Requires: offset + bytes fits in 32 bits.
  void add(const void* address, uint64_t offset, uint64_t bytes);

  // Enqueues all on `stream`; nothing where there are none. Those that are written do not overlap.
  // Requires: the stream's device has the kernel. Throws: c10::Error, if the device refuses work.
  // Never blocks. Returns how many kernels it has launched.
  size_t move(const c10::Stream& stream, Move direction) const;

 private:
  // Chunks that one launch knows, and its segments: those from `first` to the next group's.
  struct Group {
    std::array<uint64_t, kMostChunksOfLaunch> chunks{};
    size_t count = 0;
    size_t first = 0;
  };

  RecycledVector<Segment> segments_;
  std::vector<Group> groups_;
};

// Why this device does not move segments by the kernel; empty where it does. The first call for a
// device compiles it, which takes the driver some milliseconds.
const std::string& segment_kernel_lack(c10::Device device);

// Whether segments of chunks of this size are moved by the kernel on this device.
inline bool has_segment_kernel(c10::Device device, uint64_t chunk_bytes) {
  return chunk_bytes <= std::numeric_limits<uint32_t>::max() && segment_kernel_lack(device).empty();
}

// For tests and comparisons: without the kernel from now on, or with it again.
void use_segment_kernel(bool use);

}  // namespace tdcopier
