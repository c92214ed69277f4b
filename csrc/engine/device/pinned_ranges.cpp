// Counts the holders of each registration, since the driver refuses to register a byte twice.
#include "engine/device/pinned_ranges.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "base/fork_generation.h"
#include "engine/device/cuda_driver.h"

namespace tdcopier {
namespace {

struct Registration {
  uintptr_t end;
  size_t holders;
};

struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, Registration> registrations;  // by beginning; they do not overlap
  std::array<PinningCalls, c10::COMPILE_TIME_MAX_DEVICE_TYPES> calls{};
};

// Never destroyed: memory may be unpinned at any time.
Registry& registry() {
  static auto* const made = new Registry();
  return *made;
}

// The registration that contains an address, or the first one after it.
auto at_or_after(uintptr_t address) {
  auto& all = registry().registrations;
  auto found = all.upper_bound(address);
  if (found != all.begin() && std::prev(found)->second.end > address) --found;
  return found;
}

bool is_in_one(PinnedRanges::Range range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  const auto found = at_or_after(begin);
  return found != registry().registrations.end() && found->first <= begin &&
         begin + range.size() <= found->second.end;
}

constexpr int kNoSuchCall = -1;

// Makes a driver's call with the device's primary context current.
template <typename Call>
int on_cuda(c10::Device device, const Call& call) {
  const CudaDriver* driver = cuda_driver();
  void* context = nullptr;
  if (driver == nullptr || driver->register_host == nullptr) return kNoSuchCall;
  if (const int result = driver->retain_context(&context, device.index())) return result;
  const CurrentContext here(*driver, context);
  return call(*driver);
}

int pin(c10::Device device, void* begin, size_t bytes) {
  constexpr unsigned kForAllContexts = 1;  // CU_MEMHOSTREGISTER_PORTABLE
  if (const auto call = registry().calls[static_cast<size_t>(device.type())].pin) {
    return call(begin, bytes);
  }
  if (device.type() != c10::DeviceType::CUDA) return kNoSuchCall;
  return on_cuda(device, [&](const CudaDriver& driver) {
    return driver.register_host(begin, bytes, kForAllContexts);
  });
}

void unpin(c10::Device device, void* begin) {
  if (const auto call = registry().calls[static_cast<size_t>(device.type())].unpin) {
    call(begin);
  } else {
    on_cuda(device, [&](const CudaDriver& driver) { return driver.unregister_host(begin); });
  }
}

std::string reason_of(int result) {
  switch (result) {
    case kNoSuchCall:
      return "its driver has no call for that";
    case 2:  // CUDA_ERROR_OUT_OF_MEMORY
      return "the system cannot lock that memory (see `ulimit -l`, and how much is free)";
    case 712:  // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
      return "other code has pinned a part of it";
    default:
      return "the driver refused it, with error " + std::to_string(result);
  }
}

}  // namespace

void set_pinning_calls(c10::DeviceType type, PinningCalls calls) {
  registry().calls[static_cast<size_t>(type)] = calls;
}

PinnedRanges::PinnedRanges(c10::Device device, std::span<const Range> ranges)
    : device_(device), generation_(fork_generation()) {
  std::vector<Wanted> wanted;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].empty()) continue;
    const auto begin = reinterpret_cast<uintptr_t>(ranges[i].data());
    wanted.push_back({begin, begin + ranges[i].size(), i});
  }
  std::ranges::sort(wanted, {}, &Wanted::begin);
  const std::lock_guard lock(registry().mutex);
  try {
    for (size_t i = 0; i < wanted.size();) {
      Wanted all = wanted[i++];
      for (; i < wanted.size() && wanted[i].begin < all.end; ++i) {
        all.end = std::max(all.end, wanted[i].end);
      }
      hold(all);
    }
  } catch (...) {
    release();
    throw;
  }
}

void PinnedRanges::hold(const Wanted& wanted) {
  held_.reserve(held_.size() + 1);
  auto& all = registry().registrations;
  auto found = at_or_after(wanted.begin);
  if (found == all.end() || found->first >= wanted.end) {
    found = all.emplace(wanted.begin, Registration{wanted.end, 0}).first;
    const auto bytes = wanted.end - wanted.begin;
    if (const int result = pin(device_, reinterpret_cast<void*>(wanted.begin), bytes)) {
      all.erase(found);
      throw PinningError(wanted.range,
                         "cannot be pinned for " + device_.str() + ": " + reason_of(result));
    }
  } else if (found->first > wanted.begin || found->second.end < wanted.end) {
    throw PinningError(wanted.range,
                       "is pinned in part, by another call: close that one, or pin both in one");
  }
  ++found->second.holders;
  held_.push_back(found->first);
  bytes_ += wanted.end - wanted.begin;
}

// Requires: the registry is locked.
void PinnedRanges::release() noexcept {
  for (const uintptr_t begin : held_) {
    const auto found = registry().registrations.find(begin);
    if (--found->second.holders != 0) continue;
    unpin(device_, reinterpret_cast<void*>(begin));
    registry().registrations.erase(found);
  }
  held_.clear();
}

bool PinnedRanges::is_of_this_process() const {
  return generation_ == fork_generation();
}

PinnedRanges::~PinnedRanges() {
  if (!is_of_this_process()) return;
  const std::lock_guard lock(registry().mutex);
  release();
}

bool PinnedRanges::has(Range range) {
  const std::lock_guard lock(registry().mutex);
  return is_in_one(range);
}

}  // namespace tdcopier
