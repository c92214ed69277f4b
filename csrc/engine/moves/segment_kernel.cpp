// Compiles the kernel once for each device's primary context, and launches it through the driver.
#include "engine/moves/segment_kernel.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/internal_error.h"
#include "engine/device/cuda_driver.h"
#include "engine/device/graph_capture.h"
#include "kernels/move_segments_ptx.h"

namespace tdcopier {
namespace {

// Longer leaves are cut.
constexpr uint32_t kMaxSegmentBytes = 16 * 1024;
constexpr unsigned kThreadsOfBlock = 128;
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

struct Kernel {
  void* context = nullptr;  // the device's primary one
  std::string lack;         // why the kernel is unavailable; the rest is empty then
  void* few = nullptr;      // functions for up to 254, 766 and 2042 segments
  void* some = nullptr;
  void* many = nullptr;
};

std::atomic<bool> g_used = true;

std::string failed(const char* call, int result) {
  return std::string(call) + " returned " + std::to_string(result);
}

// The context is never released, as in torch.
Kernel load(int device) {
  Kernel kernel;
  const CudaDriver* driver = cuda_driver();
  if (driver == nullptr || !driver->can_launch()) {
    kernel.lack = "the driver lacks a call";
    return kernel;
  }
  if (const int result = driver->retain_context(&kernel.context, device)) {
    kernel.lack = failed("cuDevicePrimaryCtxRetain", result);
    return kernel;
  }
  const RelaxedCapture relaxed(c10::DeviceType::CUDA);
  const CurrentContext here(*driver, kernel.context);
  void* module = nullptr;
  if (const int result = driver->load_module(&module, kMoveSegmentsPtx)) {
    kernel.lack = failed("cuModuleLoadData", result) + " (drivers before 530 lack this PTX)";
    return kernel;
  }
  const std::pair<const char*, void**> functions[] = {{"move_segments_254", &kernel.few},
                                                      {"move_segments_766", &kernel.some},
                                                      {"move_segments_2042", &kernel.many}};
  for (const auto& [name, function] : functions) {
    if (const int result = driver->get_function(function, module, name)) {
      kernel.lack = failed("cuModuleGetFunction", result);
    }
  }
  return kernel;
}

// Loads kernels at first use and never destroys them. A failure may be temporary, for example a
// lack of memory, so it is retried a few times.
const Kernel& kernel_of(c10::Device device) {
  constexpr int kMostTries = 3;
  struct Loaded {
    const Kernel* kernel = nullptr;
    int tries = 0;
  };
  struct Kernels {
    std::mutex mutex;
    std::vector<Loaded> by_device;  // guarded by mutex
  };
  static auto* const kernels = new Kernels();
  const auto index = static_cast<size_t>(device.index());
  const std::lock_guard lock(kernels->mutex);
  if (kernels->by_device.size() <= index) kernels->by_device.resize(index + 1);
  auto& [kernel, tries] = kernels->by_device[index];
  const bool is_lacking = kernel == nullptr || !kernel->lack.empty();
  if (is_lacking && tries < kMostTries) {
    kernel = new Kernel(load(device.index()));
    ++tries;
  }
  return *kernel;
}

template <size_t kMost>
void launch(void* function, void* stream, Move direction, const uint64_t* chunks,
            std::span<const Segment> segments) {
  Parameters<kMost> parameters;
  std::copy_n(chunks, kMostChunksOfLaunch, parameters.chunks);
  parameters.scatter = static_cast<uint32_t>(direction);
  std::memcpy(parameters.each, segments.data(), segments.size_bytes());
  void* arguments[] = {&parameters};
  const int result = cuda_driver()->launch(function, static_cast<unsigned>(segments.size()), 1, 1,
                                           kThreadsOfBlock, 1, 1, 0, stream, arguments, nullptr);
  TORCH_CHECK(result == 0, "CUDA error: cuLaunchKernel returned ", result,
              " for a copy between leaves and their chunk");
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
  const auto chunk = static_cast<uint32_t>(groups_.back().count - 1) << kBytesBits;
  for (uint64_t at = 0; at < bytes; at += kMaxSegmentBytes) {
    const auto part = static_cast<uint32_t>(std::min<uint64_t>(bytes - at, kMaxSegmentBytes));
    segments_.push_back({reinterpret_cast<uint64_t>(address) + at,
                         static_cast<uint32_t>(offset + at), chunk | part});
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
  if (segments_.empty()) return;
  const Kernel& kernel = kernel_of(stream.device());
  check_invariant(kernel.lack.empty(), "segments are moved where there is a kernel for them");
  const CurrentContext here(*cuda_driver(), kernel.context);
  void* const handle = native_handle(stream);
  for (size_t i = 0; i < groups_.size(); ++i) {
    std::span<const Segment> segments = segments_of(i);
    const uint64_t* const chunks = groups_[i].chunks.data();
    while (!segments.empty()) {
      const auto part = segments.first(std::min(segments.size(), kMostSegmentsOfLaunch));
      if (part.size() <= 254) {
        launch<254>(kernel.few, handle, direction, chunks, part);
      } else if (part.size() <= 766) {
        launch<766>(kernel.some, handle, direction, chunks, part);
      } else {
        launch<kMostSegmentsOfLaunch>(kernel.many, handle, direction, chunks, part);
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
  return kernel_of(device).lack;
}

void use_segment_kernel(bool use) {
  g_used = use;
}

}  // namespace tdcopier
