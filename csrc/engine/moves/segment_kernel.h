// Moves many segments on a CUDA device with one kernel.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// A part of a leaf, and its place in a chunk. The same as in kernels/move_segments.cu.
struct Segment {
  uint64_t address;          // on the device
  uint32_t offset;           // in the chunk, which may be any memory that the device can access
  uint32_t chunk_and_bytes;  // chunk's index in the launch (upper 8 bits), and bytes
};
inline constexpr size_t kMostChunksOfLaunch = 8;
// Longer leaves are cut.
inline constexpr uint32_t kSegmentBytes = 16 * 1024;

enum class Move : uint32_t {
  kGather = 0,   // from the addresses to the slots
  kScatter = 1,  // from the slots to the addresses
};

// Leaves and their slots, cut into segments. One block of threads moves each segment.
class Segments {
 public:
  explicit Segments(size_t leaves, uint32_t most_segment_bytes = kSegmentBytes)
      : most_segment_bytes_(most_segment_bytes) {
    segments_.reserve(leaves);
  }

  // Starts a chunk: the leaves added from here on have their slots in it.
  void begin_chunk(std::byte* memory);
  // Adds a leaf. Requires: offset + bytes fits in 32 bits.
  void add(const void* address, uint64_t offset, uint64_t bytes);
  // Adds a leaf that has its slot anywhere. Requires: all are added so, and none is larger than
  // kMostBytesAnywhere.
  void add_anywhere(const void* address, std::byte* slot, uint64_t bytes);
  static constexpr uint64_t kMostBytesAnywhere = uint64_t{1} << 31;

  // Returns the number of kernels that move() launches, 0 without segments.
  size_t launches() const;
  // Enqueues the moves of all segments on `stream`. Never blocks. Requires: the stream's
  // device has the kernel, and the bytes that are written do not overlap. Throws: c10::Error, if
  // the device refuses work.
  void move(const c10::Stream& stream, Move direction) const;

 private:
  // The chunks that a launch can refer to, and its segments: from `first` to the next group's
  // `first`.
  struct Group {
    std::array<uint64_t, kMostChunksOfLaunch> chunks{};
    size_t count = 0;
    size_t first = 0;
  };

  std::span<const Segment> segments_of(size_t group) const;
  void add(const void* address, size_t chunk, uint64_t offset, uint64_t bytes);

  const uint32_t most_segment_bytes_;
  RecycledVector<Segment> segments_;
  std::vector<Group> groups_;
};

// Returns why this device does not use the kernel; empty if it does. The first call for a device
// compiles the kernel, which takes the driver a few milliseconds.
const std::string& why_no_segment_kernel(c10::Device device);

// Returns whether the kernel moves segments of chunks of this size on this device.
inline bool has_segment_kernel(c10::Device device, uint64_t chunk_bytes) {
  return chunk_bytes <= std::numeric_limits<uint32_t>::max() &&
         why_no_segment_kernel(device).empty();
}

// Turns the kernel off, or on again, for tests and comparisons.
void use_segment_kernel(bool use);

}  // namespace tdcopier
