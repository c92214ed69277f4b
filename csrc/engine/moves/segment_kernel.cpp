// Cuts leaves into segments, and launches the kernel for as many as fit in its parameters.
#include "engine/moves/segment_kernel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <vector>

#include "engine/moves/kernel_launch.h"
#include "kernels/move_segments_ptx.h"

namespace tdcopier {
namespace {

constexpr unsigned kSegmentThreads = 128;
constexpr size_t kMostSegmentsOfLaunch = 2042;

constexpr uint32_t kBytesBits = 24;

template <size_t kMost>
struct Parameters {
  uint64_t chunks[kMostChunksOfLaunch];
  uint32_t scatter;
  uint32_t unused = 0;
  Segment each[kMost];
};
static_assert(sizeof(Parameters<kMostSegmentsOfLaunch>) <= 32764,
              "what a kernel's parameters may hold");

std::atomic<bool> g_used = true;

enum Functions : size_t { kFew, kSome, kMany };  // for up to 254, 766 and 2042 segments

CudaKernels& segment_kernels() {
  static constexpr const char* kNames[] = {"move_segments_254", "move_segments_766",
                                           "move_segments_2042"};
  static auto& kernels =
      *new CudaKernels("a copy between leaves and their chunk", kMoveSegmentsPtx, kNames);
  return kernels;
}

template <size_t kMost>
void launch(const c10::Stream& stream, size_t function, Move direction, const uint64_t* chunks,
            std::span<const Segment> segments) {
  Parameters<kMost> parameters;
  std::copy_n(chunks, kMostChunksOfLaunch, parameters.chunks);
  parameters.scatter = static_cast<uint32_t>(direction);
  std::memcpy(parameters.each, segments.data(), segments.size_bytes());
  void* arguments[] = {&parameters};
  segment_kernels().launch(stream, function, static_cast<unsigned>(segments.size()),
                           kSegmentThreads, arguments);
}

}  // namespace

void Segments::begin_chunk(std::byte* memory) {
  if (groups_.empty() || groups_.back().count == kMostChunksOfLaunch) {
    groups_.push_back({.first = segments_.size()});
  }
  Group& group = groups_.back();
  group.chunks[group.count++] = reinterpret_cast<uint64_t>(memory);
}

void Segments::add(const void* address, uint64_t offset, uint64_t bytes) {
  add(address, groups_.back().count - 1, offset, bytes);
}

// All memory from one multiple of kMostBytesAnywhere to the second next is a chunk.
void Segments::add_anywhere(const void* address, std::byte* slot, uint64_t bytes) {
  const auto to = reinterpret_cast<uint64_t>(slot);
  const uint64_t begin = to / kMostBytesAnywhere * kMostBytesAnywhere;
  const auto chunk_of = [&](const Group& group) {
    const auto end = group.chunks.begin() + static_cast<ptrdiff_t>(group.count);
    return static_cast<size_t>(std::find(group.chunks.begin(), end, begin) - group.chunks.begin());
  };
  if (groups_.empty() || chunk_of(groups_.back()) == groups_.back().count) {
    begin_chunk(reinterpret_cast<std::byte*>(begin));
  }
  add(address, chunk_of(groups_.back()), to - begin, bytes);
}

void Segments::add(const void* address, size_t chunk, uint64_t offset, uint64_t bytes) {
  const auto upper = static_cast<uint32_t>(chunk) << kBytesBits;
  for (uint64_t at = 0; at < bytes; at += most_segment_bytes_) {
    const auto part = static_cast<uint32_t>(std::min<uint64_t>(bytes - at, most_segment_bytes_));
    segments_.push_back({reinterpret_cast<uint64_t>(address) + at,
                         static_cast<uint32_t>(offset + at), upper | part});
  }
}

std::span<const Segment> Segments::segments_of(size_t group) const {
  const size_t last = group + 1 < groups_.size() ? groups_[group + 1].first : segments_.size();
  return {segments_.data() + groups_[group].first, last - groups_[group].first};
}

size_t Segments::launches() const {
  size_t launches = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    launches += (segments_of(i).size() + kMostSegmentsOfLaunch - 1) / kMostSegmentsOfLaunch;
  }
  return launches;
}

void Segments::move(const c10::Stream& stream, Move direction) const {
  for (size_t i = 0; i < groups_.size(); ++i) {
    std::span<const Segment> segments = segments_of(i);
    const uint64_t* const chunks = groups_[i].chunks.data();
    while (!segments.empty()) {
      const auto part = segments.first(std::min(segments.size(), kMostSegmentsOfLaunch));
      if (part.size() <= 254) {
        launch<254>(stream, kFew, direction, chunks, part);
      } else if (part.size() <= 766) {
        launch<766>(stream, kSome, direction, chunks, part);
      } else {
        launch<kMostSegmentsOfLaunch>(stream, kMany, direction, chunks, part);
      }
      segments = segments.subspan(part.size());
    }
  }
}

const std::string& why_no_segment_kernel(c10::Device device) {
  static const std::string other = "it needs a CUDA device";
  static const std::string off = "it is switched off";
  if (device.type() != c10::DeviceType::CUDA) return other;
  if (!g_used.load(std::memory_order_relaxed)) return off;
  return segment_kernels().on(device).lack;
}

void use_segment_kernel(bool use) {
  g_used = use;
}

}  // namespace tdcopier
