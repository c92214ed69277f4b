// Allocates pinned blocks and counts their bytes.
#include "sim/pinned_allocator.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "sim/faults.h"
#include "sim/runtime.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

constexpr std::int64_t kOnlyPool = 0;

// Fills in the fields that exist: their names differ between versions of torch.
template <typename Stats>
Stats host_stats(const PinnedBytes& bytes) {
  Stats stats;
  if constexpr (requires { stats.allocated_bytes.current; }) {
    stats.allocated_bytes.current = bytes.current;
    stats.allocated_bytes.peak = bytes.peak;
  }
  if constexpr (requires { stats.active_bytes.current; }) stats.active_bytes.current = bytes.in_use;
  return stats;
}

}  // namespace

PinnedAllocator& PinnedAllocator::get() {
  static auto* const instance = [] {
    // A child may free memory too, and must find the lock open.
    pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                   [] { get().mutex_.unlock(); });
    return new PinnedAllocator;  // leaked: tensors are freed at any time
  }();
  return *instance;
}

c10::DataPtr PinnedAllocator::allocate(std::size_t bytes) {
  if (bytes == 0) return {nullptr, nullptr, &free_block, c10::DeviceType::CPU};
  strike_pinned_allocation(bytes);
  const auto size = rounded_size(bytes);
  const auto signed_size = static_cast<std::int64_t>(size);
  const std::lock_guard lock(mutex_);
  auto* block = cache_.reuse(kOnlyPool, size);
  if (block == nullptr) {
    block = cache_.allocate(kOnlyPool, size);
    TORCH_CHECK(block != nullptr, "the host has no ", size, " bytes of memory to pin");
    bytes_.current += signed_size;
    bytes_.peak = std::max(bytes_.peak, bytes_.current);
  }
  block->in_use = true;
  if (Tracker::is_on()) Tracker::get().handed_out(*block, std::nullopt, nullptr);
  bytes_.in_use += signed_size;
  return {block->data, block, &free_block, c10::DeviceType::CPU};
}

void PinnedAllocator::copy_data(void* target, const void* source, std::size_t bytes) const {
  std::memcpy(target, source, bytes);
}

bool PinnedAllocator::record_event(void* data, void* context, c10::Stream stream) {
  auto& queue = queue_of(stream);
  const std::lock_guard lock(mutex_);
  auto* block = cache_.starting_at(data);
  if (block == nullptr && context != nullptr) {
    // A view: its context, if it is a block of ours, is the block that contains its address.
    // Comparing the two does not dereference a pointer that may be another allocator's.
    auto* const around = cache_.containing(data);
    if (around == context) block = around;
  }
  if (block == nullptr) return false;
  auto& users = block->users;
  if (std::find(users.begin(), users.end(), &queue) == users.end()) users.push_back(&queue);
  return true;
}

void PinnedAllocator::empty_cache() {
  const std::lock_guard lock(mutex_);
  bytes_.current -= static_cast<std::int64_t>(cache_.trim([](std::int64_t) { return true; }));
}

at::HostStats PinnedAllocator::get_stats() {
  return host_stats<at::HostStats>(bytes());
}

void PinnedAllocator::reset_peak_stats() {
  const std::lock_guard lock(mutex_);
  bytes_.peak = bytes_.current;
}

PinnedBytes PinnedAllocator::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

int PinnedAllocator::pin(void* begin, std::size_t bytes) noexcept {
  constexpr int kAlreadyPinned = 712;
  try {
    strike_pinned_allocation(bytes);
  } catch (const c10::AcceleratorError& error) {
    return error.get_error_code();
  } catch (...) {
    return kMemoryAllocation;  // the host has no memory for the message
  }
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard lock(mutex_);
  const auto next = in_place_.upper_bound(first + bytes - 1);
  if (next != in_place_.begin() && std::prev(next)->first + std::prev(next)->second > first) {
    return kAlreadyPinned;
  }
  in_place_.emplace(first, bytes);
  return 0;
}

int PinnedAllocator::unpin(void* begin) {
  constexpr int kNotPinned = 713;
  const std::lock_guard lock(mutex_);
  if (in_place_.erase(reinterpret_cast<std::uintptr_t>(begin)) == 0) return kNotPinned;
  if (Tracker::is_on()) Tracker::get().unpinned(begin);
  return 0;
}

bool PinnedAllocator::is_pinned(const void* data) const {
  const std::lock_guard lock(mutex_);
  return cache_.containing(data) != nullptr || pinned_in_place(data);
}

std::optional<Place> PinnedAllocator::place_of(const void* data) const {
  const std::lock_guard lock(mutex_);
  const auto block = cache_.place_of(data);
  return block ? block : pinned_in_place(data);
}

std::optional<Place> PinnedAllocator::pinned_in_place(const void* data) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto next = in_place_.upper_bound(address);
  if (next == in_place_.begin()) return std::nullopt;
  const auto& [begin, size] = *--next;
  if (address >= begin + size) return std::nullopt;
  return Place{begin, size, /*in_use=*/true};
}

void PinnedAllocator::free_block(void* context) {
  if (context == nullptr) return;
  auto* const block = static_cast<Block*>(context);
  auto& allocator = get();
  const std::lock_guard lock(allocator.mutex_);
  if (in_forked_child()) return check_freed_in_child(*block);
  allocator.bytes_.in_use -= static_cast<std::int64_t>(block->size);
  allocator.cache_.recycle(block);
}

}  // namespace tdcopier::sim
