// Counts the holders of each registration, since the driver refuses to register a byte twice.
#include "engine/device/pinned_ranges.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "base/fork_generation.h"
#include "base/monitor.h"
#include "engine/device/cuda_driver.h"

namespace tdcopier {
namespace {

struct Registration {
  uintptr_t end;
  size_t holders;
  const PinnedRanges* ended_by = nullptr;  // who will unpin it, if there are no holders
};

// The same, for accesses.
struct Usable {
  uintptr_t end;
  bool is_pinned;  // false: not yet, or not much longer
};

struct Registry {
  std::mutex mutex;  // held during the driver's calls, which are slow
  std::map<uintptr_t, Registration> registrations;  // by beginning; they do not overlap
  std::array<PinningCalls, c10::COMPILE_TIME_MAX_DEVICE_TYPES> calls{};

  // For accesses. Each counts in the epoch in which it began. Who ends the use of memory begins the
  // next epoch, and waits for the accesses of the last one.
  Mutex usable_mutex;  // guards all below
  std::map<uintptr_t, Usable> usable;
  size_t epoch = 0;
  std::array<size_t, 2> accesses{};
  Condition access_ended;
};

// Never destroyed: memory may be unpinned at any time.
Registry& registry() {
  static auto* const made = new Registry();
  return *made;
}

// Returns the entry that contains an address, or the first one after it.
template <typename Entries>
auto at_or_after(Entries& entries, uintptr_t address) {
  auto found = entries.upper_bound(address);
  if (found != entries.begin() && std::prev(found)->second.end > address) --found;
  return found;
}

void set_usable(uintptr_t begin, Usable usable) {
  const std::lock_guard lock(registry().usable_mutex);
  registry().usable[begin] = usable;
}

void erase_usable(uintptr_t begin) {
  const std::lock_guard lock(registry().usable_mutex);
  registry().usable.erase(begin);
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
  try {
    const std::lock_guard lock(registry().mutex);
    for (size_t i = 0; i < wanted.size();) {
      Wanted all = wanted[i++];
      for (; i < wanted.size() && wanted[i].begin < all.end; ++i) {
        all.end = std::max(all.end, wanted[i].end);
      }
      hold(all);
    }
  } catch (...) {
    end_use();
    unpin_ended();
    throw;
  }
}

// Requires: the registry is locked. An address is usable before the driver pins it, though not
// pinned yet: who finds that it is pinned must not take that for the work of other code.
void PinnedRanges::hold(const Wanted& wanted) {
  held_.reserve(held_.size() + 1);
  auto& all = registry().registrations;
  auto found = at_or_after(all, wanted.begin);
  if (found == all.end() || found->first >= wanted.end) {
    found = all.emplace(wanted.begin, Registration{wanted.end, 0}).first;
    set_usable(wanted.begin, {wanted.end, /*is_pinned=*/false});
    const auto bytes = wanted.end - wanted.begin;
    if (const int result = pin(device_, reinterpret_cast<void*>(wanted.begin), bytes)) {
      erase_usable(wanted.begin);
      all.erase(found);
      throw PinningError(wanted.range,
                         "cannot be pinned for " + device_.str() + ": " + reason_of(result));
    }
  } else if (found->first > wanted.begin || found->second.end < wanted.end) {
    throw PinningError(wanted.range,
                       "is pinned in part, by another call: close that one, or pin both in one");
  }
  ++found->second.holders;
  found->second.ended_by = nullptr;
  held_.push_back(found->first);
  set_usable(found->first, {found->second.end, /*is_pinned=*/true});
  bytes_ += wanted.end - wanted.begin;
}

void PinnedRanges::end_use() {
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    for (const uintptr_t begin : held_) {
      Registration& registration = all.registrations.at(begin);
      if (--registration.holders != 0) continue;
      registration.ended_by = this;
      set_usable(begin, {registration.end, /*is_pinned=*/false});
    }
  }
  std::unique_lock lock(all.usable_mutex);
  // Another thread may still wait for the epoch before.
  all.access_ended.wait(lock, [&] { return all.accesses[all.epoch ^ 1] == 0; });
  const size_t last = std::exchange(all.epoch, all.epoch ^ 1);
  all.access_ended.wait(lock, [&] { return all.accesses[last] == 0; });
}

void PinnedRanges::resume_use() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const uintptr_t begin : held_) {
    Registration& registration = all.registrations.at(begin);
    ++registration.holders;
    registration.ended_by = nullptr;
    set_usable(begin, {registration.end, /*is_pinned=*/true});
  }
}

bool PinnedRanges::is_of_this_process() const {
  return generation_ == fork_generation();
}

PinnedRanges::~PinnedRanges() {
  if (is_of_this_process()) unpin_ended();
}

void PinnedRanges::unpin_ended() noexcept {
  auto& all = registry().registrations;
  const std::lock_guard lock(registry().mutex);
  for (const uintptr_t begin : held_) {
    const auto found = all.find(begin);
    // Another one may hold it again, and then that one unpins it.
    if (found == all.end() || found->second.ended_by != this) continue;
    unpin(device_, reinterpret_cast<void*>(begin));
    erase_usable(begin);
    all.erase(found);
  }
}

PinnedRanges::Access::Access()
    : epoch_([] {
        const std::lock_guard lock(registry().usable_mutex);
        ++registry().accesses[registry().epoch];
        return registry().epoch;
      }()) {}

PinnedRanges::Access::~Access() {
  {
    const std::lock_guard lock(registry().usable_mutex);
    if (--registry().accesses[epoch_] != 0 || epoch_ == registry().epoch) return;
  }
  registry().access_ended.notify_all();
}

namespace {

// Requires: the entries are locked.
PinnedRanges::Found found_in(const std::map<uintptr_t, Usable>& entries,
                             PinnedRanges::Range range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  const auto found = at_or_after(entries, begin);
  if (found == entries.end() || found->first > begin) return PinnedRanges::Found::kNowhere;
  const auto [end, is_pinned] = found->second;
  const bool has_all = is_pinned && begin + range.size() <= end;
  return has_all ? PinnedRanges::Found::kPinned : PinnedRanges::Found::kNot;
}

}  // namespace

PinnedRanges::Found PinnedRanges::find(Range range) {
  const std::lock_guard lock(registry().usable_mutex);
  return found_in(registry().usable, range);
}

bool is_pinned(PinnedRanges::Range range) {
  // Torch is asked first: what a PinnedRanges pins meanwhile is then found below.
  if (!at::globalContext().isPinnedPtr(range.data())) return false;
  return PinnedRanges::find(range) != PinnedRanges::Found::kNot;
}

bool PinnedTables::are_pinned(const PinnedRanges::Access& /*access*/) const {
  const std::lock_guard lock(registry().usable_mutex);
  return std::ranges::all_of(registered, [](const void* table) {
    const auto* const first = static_cast<const std::byte*>(table);
    return found_in(registry().usable, {first, 1}) == PinnedRanges::Found::kPinned;
  });
}

}  // namespace tdcopier
