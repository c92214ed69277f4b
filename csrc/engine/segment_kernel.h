// Many segments moved on a CUDA device by one kernel.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "base/recycled.h"

namespace tdcopier {

// Bytes of a leaf, and their slot in memory that all share. As in kernels/move_segments.cu.
struct Segment {
  uint64_t address;  // on the device
  uint32_t offset;   // of the slot
  uint32_t bytes;
};

enum class Move : uint32_t {
  kGather = 0,   // from the addresses to the slots
  kScatter = 1,  // from the slots to the addresses
};

// The leaves' bytes and their slots, cut: each segment is the work of one block of threads.
class Segments {
 public:
  explicit Segments(size_t leaves) { segments_.reserve(leaves); }

  // Requires: offset + bytes fits in 32 bits.
  void add(const void* address, uint64_t offset, uint64_t bytes);
  std::span<const Segment> all() const { return segments_; }

 private:
  RecycledVector<Segment> segments_;
};

// Enqueues on `stream`; nothing where there are no segments. Those that are written do not overlap.
// Requires: the stream's device has the kernel. Throws: c10::Error, if the device refuses work.
// Thread: any. Never blocks.
void move_segments(const c10::Stream& stream, Move move, std::byte* memory,
                   std::span<const Segment> segments);

// Why this device does not move segments by the kernel; empty where it does. The first call for a
// device compiles it, which takes the driver some milliseconds.
const std::string& segment_kernel_lack(c10::Device device);

// Whether segments of so much memory are moved by the kernel on this device.
inline bool has_segment_kernel(c10::Device device, uint64_t memory_bytes) {
  return memory_bytes <= std::numeric_limits<uint32_t>::max() &&
         segment_kernel_lack(device).empty();
}

// For tests and comparisons: without the kernel from now on, or with it again.
void use_segment_kernel(bool use);

}  // namespace tdcopier
