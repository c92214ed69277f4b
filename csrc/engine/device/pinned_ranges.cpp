// Counts the holders of each registration, since the driver refuses to register a byte twice.
#include "engine/device/pinned_ranges.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "base/forks.h"
#include "base/monitor.h"
#include "engine/device/cuda_driver.h"

namespace tdcopier {
namespace {

using Usable = PinnedRanges::Usable;
using AllUsable = std::shared_ptr<const std::vector<Usable>>;

struct Registration {
  uintptr_t end;
  bool is_pinned = false;  // false: not yet, or not much longer
  size_t holders = 0;
  const PinnedRanges* ended_by = nullptr;  // who will unpin it, if there are no holders
};

struct Registry {
  std::mutex mutex;  // held during the driver's calls, which are slow
  std::map<uintptr_t, Registration> registrations;  // by beginning; they do not overlap
  std::array<PinningCalls, c10::COMPILE_TIME_MAX_DEVICE_TYPES> calls{};

  // For accesses. Each counts in the epoch in which it began. Who ends the use of memory begins the
  // next epoch, and waits for the accesses of the last one.
  Mutex usable_mutex;  // guards all below
  AllUsable usable = std::make_shared<const std::vector<Usable>>();
  size_t epoch = 0;
  std::array<size_t, 2> accesses{};
  bool is_epoch_ending = false;  // a thread waits for the accesses of the last one
  Condition access_ended;
};

// Never destroyed: memory may be unpinned at any time.
Registry& registry() {
  static auto* const made = new Registry();
  return *made;
}

// Shows accesses the registrations as they are now. Requires: the registry is locked.
void publish() {
  std::vector<Usable> now;
  now.reserve(registry().registrations.size());
  for (const auto& [begin, it] : registry().registrations) {
    now.push_back({begin, it.end, it.is_pinned});
  }
  AllUsable shown = std::make_shared<const std::vector<Usable>>(std::move(now));
  const std::lock_guard lock(registry().usable_mutex);
  registry().usable.swap(shown);
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
  size_t joined = 0;
  for (const Wanted& next : wanted) {
    if (joined != 0 && next.begin < wanted[joined - 1].end) {
      wanted[joined - 1].end = std::max(wanted[joined - 1].end, next.end);
    } else {
      wanted[joined++] = next;
    }
  }
  wanted.resize(joined);
  try {
    hold_all(wanted);
  } catch (...) {
    end_use();
    unpin_ended();
    throw;
  }
}

// Shows addresses before the driver pins them, though not as pinned: who finds that they are must
// not take that for the work of other code.
void PinnedRanges::hold_all(std::span<const Wanted> wanted) {
  const std::lock_guard lock(registry().mutex);
  auto& all = registry().registrations;
  std::vector<uintptr_t> added;
  added.reserve(wanted.size());
  held_.reserve(wanted.size());
  try {
    for (const Wanted& each : wanted) {
      auto found = all.upper_bound(each.begin);
      if (found != all.begin() && std::prev(found)->second.end > each.begin) --found;
      if (found == all.end() || found->first >= each.end) {
        all.emplace_hint(found, each.begin, Registration{each.end});
        added.push_back(each.begin);
      } else if (found->first > each.begin || found->second.end < each.end) {
        throw PinningError(
            each.range, "is pinned in part, by another call: close that one, or pin both in one");
      }
    }
    publish();
    for (const Wanted& each : wanted) hold(each);
  } catch (...) {
    for (const uintptr_t begin : added) {
      const auto found = all.find(begin);
      if (found->second.holders == 0) all.erase(found);
    }
    publish();
    throw;
  }
  publish();
}

// Requires: it is within a registration.
void PinnedRanges::hold(const Wanted& wanted) {
  const auto found = std::prev(registry().registrations.upper_bound(wanted.begin));
  auto& [begin, registration] = *found;
  if (!registration.is_pinned && registration.ended_by == nullptr) {
    void* const first = reinterpret_cast<void*>(begin);
    if (const int result = pin(device_, first, registration.end - begin)) {
      throw PinningError(wanted.range,
                         "cannot be pinned for " + device_.str() + ": " + reason_of(result));
    }
  }
  ++registration.holders;
  registration.is_pinned = true;
  registration.ended_by = nullptr;
  held_.push_back(begin);
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
      registration.is_pinned = false;
    }
    publish();
  }
  // One thread at a time: a second one would begin the epoch again that the first one waits for.
  std::unique_lock lock(all.usable_mutex);
  all.access_ended.wait(lock, [&] { return !all.is_epoch_ending; });
  all.is_epoch_ending = true;
  const auto ended = c10::make_scope_exit([&] {
    all.is_epoch_ending = false;
    all.access_ended.notify_all();
  });
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
    registration.is_pinned = true;
  }
  publish();
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
    all.erase(found);
  }
  publish();
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

PinnedRanges::View::View() {
  const std::lock_guard lock(registry().usable_mutex);
  all_ = registry().usable;
}

PinnedRanges::Found PinnedRanges::View::find(Range range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  const auto has_begin = [&](size_t i) {
    return i < all_->size() && (*all_)[i].begin <= begin && begin < (*all_)[i].end;
  };
  if (!has_begin(next_)) {
    const auto after = std::ranges::upper_bound(*all_, begin, {}, &Usable::begin);
    if (after == all_->begin() || std::prev(after)->end <= begin) return Found::kNowhere;
    next_ = static_cast<size_t>(after - all_->begin()) - 1;
  }
  const Usable& found = (*all_)[next_++];
  return found.is_pinned && begin + range.size() <= found.end ? Found::kPinned : Found::kNot;
}

PinnedRanges::Found PinnedRanges::find(Range range) {
  return View().find(range);
}

bool is_pinned_for_driver(const void* data) {
  try {
    return at::globalContext().isPinnedPtr(data);
  } catch (const c10::Error&) {
    if (fork_generation() == 0) throw;
    return false;
  }
}

bool is_pinned(PinnedRanges::Range range) {
  // Torch is asked first: what a PinnedRanges pins meanwhile is then found below.
  if (!is_pinned_for_driver(range.data())) return false;
  return PinnedRanges::find(range) != PinnedRanges::Found::kNot;
}

// A PinnedRanges shows memory before it pins it, and until it has unpinned it. So what the driver
// says is of others if all ranges were the same before and after the question.
bool is_pinned_by_others(PinnedRanges::Range range) {
  while (true) {
    PinnedRanges::View before;
    if (before.find(range) != PinnedRanges::Found::kNowhere) return false;
    if (!is_pinned_for_driver(range.data())) return false;
    if (PinnedRanges::View() == before) return true;
  }
}

namespace {

// Returns the function that frees memory which torch pins for a device type; null if it is not
// known. Memory of no bytes has it too.
c10::DeleterFnPtr deleter_of_torch(c10::DeviceType type) {
  const c10::DeleterFnPtr found = at::getHostAllocator(type)->allocate(0).get_deleter();
  return found == &c10::detail::deleteNothing ? nullptr : found;
}

}  // namespace

InPlace PinnedLookup::find(const c10::StorageImpl& storage, bool asks_driver) {
  using Found = PinnedRanges::Found;
  const PinnedRanges::Range memory{static_cast<const std::byte*>(storage.data()), storage.nbytes()};
  if (memory.empty()) return InPlace::kNo;
  if (!torch_deleter_) torch_deleter_ = deleter_of_torch(device_.type());
  if (storage.data_ptr().get_deleter() == *torch_deleter_) return InPlace::kPinnedByTorch;
  if (!view_) view_.emplace();
  const Found found = view_->find(memory);
  if (found == Found::kPinned) return InPlace::kRegistered;
  if (found == Found::kNot || !asks_driver || !asks_driver_) return InPlace::kNo;
  asks_driver_ = is_pinned_by_others(memory) && is_pinned_by_others(memory.last(1));
  return asks_driver_ ? InPlace::kPinnedByTorch : InPlace::kNo;
}

PinnedTables PinnedLookup::tables() {
  if (!view_) view_.emplace();
  return {*view_};
}

bool PinnedTables::are_pinned(const PinnedRanges::Access& /*access*/) const {
  PinnedRanges::View now;
  return now == seen || std::ranges::all_of(registered, [&](const void* table) {
           const auto* const first = static_cast<const std::byte*>(table);
           return now.find({first, 1}) == PinnedRanges::Found::kPinned;
         });
}

}  // namespace tdcopier
