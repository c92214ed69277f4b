// Allocates device memory, and keeps its statistics and its limit.
#include "sim/device_allocator.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "sim/faults.h"
#include "sim/note.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

// Returns the pool of the cache that belongs to a stream.
std::int64_t pool_of(c10::Stream stream) {
  return std::int64_t{stream.device_index()} * kStreamsPerDevice + stream.id();
}

std::int64_t device_of_pool(std::int64_t pool) {
  return pool / kStreamsPerDevice;
}

}  // namespace

DeviceAllocator& DeviceAllocator::get() {
  static auto* const instance = [] {
    // A child may free memory too, and must find the lock open.
    pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                   [] { get().mutex_.unlock(); });
    return new DeviceAllocator;  // leaked: tensors are freed at any time
  }();
  return *instance;
}

c10::DataPtr DeviceAllocator::allocate(std::size_t bytes) {
  const auto index = resolve_device(-1);
  const c10::Device device(kDeviceType, index);
  if (bytes == 0) return {nullptr, device};
  const auto size = rounded_size(bytes);
  const auto pool = pool_of(current_stream(index));
  strike_device_allocation(index, bytes);

  std::unique_lock lock(mutex_);
  auto* block = cache_.reuse(pool, size);
  if (block == nullptr) {
    wait_for_unused(index, size, lock);
    block = allocate_block(index, pool, size);
    block->owner = &current_queue(index);
  }
  block->in_use = true;
  if (Tracker::is_on()) Tracker::get().handed_out(*block, int{index}, block->owner);
  auto& stats = device_at(index).stats;
  stats.allocated += static_cast<std::int64_t>(size);
  stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
  ++stats.allocations;
  return {block->data, block->data, &free_data, device};
}

c10::DeleterFnPtr DeviceAllocator::raw_deleter() const {
  return &free_data;
}

void DeviceAllocator::copy_data(void* target, const void* source, std::size_t bytes) const {
  const auto device = device_of(target);
  TORCH_CHECK(device.has_value(), "the target of the copy is not memory of the simulated device");
  Operation copy{"copy", [target, source, bytes] { std::memmove(target, source, bytes); }};
  if (Tracker::is_on() && bytes > 0) {
    copy.note = note_of(c10::str("a copy of ", bytes, " bytes of a storage"),
                        access_to(source, bytes, /*writes=*/false),
                        access_to(target, bytes, /*writes=*/true));
  }
  current_queue(*device).enqueue(std::move(copy));
}

void DeviceAllocator::emptyCache(c10::MempoolId_t pool) {
  const std::lock_guard lock(mutex_);
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) trim(i);
}

void DeviceAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get() == nullptr || data.get_deleter() != &free_data) return;
  auto& queue = queue_of(stream);
  const std::lock_guard lock(mutex_);
  auto* const block = cache_.starting_at(data.get());
  if (block == nullptr || block->pool == pool_of(stream)) return;
  auto& users = block->users;
  if (std::find(users.begin(), users.end(), &queue) == users.end()) users.push_back(&queue);
}

c10::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(c10::DeviceIndex device) {
  const auto ours = stats(device);
  c10::CachingDeviceAllocator::DeviceStats result;
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  auto& allocated = result.allocated_bytes[kAll];
  allocated.current = ours.allocated;
  allocated.peak = ours.peak_allocated;
  auto& reserved = result.reserved_bytes[kAll];
  reserved.current = ours.reserved;
  reserved.peak = ours.peak_reserved;
  result.allocation[kAll].allocated = ours.allocations;
  return result;
}

void DeviceAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  const auto index = resolve_device(device);
  const std::lock_guard lock(mutex_);
  device_at(index).stats.allocations = 0;
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex device) {
  const auto index = resolve_device(device);
  const std::lock_guard lock(mutex_);
  auto& stats = device_at(index).stats;
  stats.peak_allocated = stats.allocated;
  stats.peak_reserved = stats.reserved;
}

MemoryStats DeviceAllocator::stats(c10::DeviceIndex device) const {
  const auto index = resolve_device(device);
  const std::lock_guard lock(mutex_);
  return devices_[static_cast<std::size_t>(index)].stats;
}

void DeviceAllocator::set_limit(c10::DeviceIndex device, std::optional<std::int64_t> bytes) {
  const auto index = resolve_device(device);
  TORCH_CHECK_VALUE(!bytes || *bytes >= 0, "a memory limit must not be negative, got ", *bytes);
  const std::lock_guard lock(mutex_);
  device_at(index).limit = bytes;
}

std::optional<c10::DeviceIndex> DeviceAllocator::device_of(const void* data) const {
  const std::lock_guard lock(mutex_);
  const auto* const block = cache_.containing(data);
  if (block == nullptr) return std::nullopt;
  return static_cast<c10::DeviceIndex>(device_of_pool(block->pool));
}

std::optional<Place> DeviceAllocator::place_of(const void* data) const {
  const std::lock_guard lock(mutex_);
  return cache_.place_of(data);
}

void DeviceAllocator::free_data(void* data) {
  if (data == nullptr) return;
  auto& allocator = get();
  const std::lock_guard lock(allocator.mutex_);
  auto* const block = allocator.cache_.starting_at(data);
  TORCH_INTERNAL_ASSERT(block != nullptr, "freed a block twice, or one of another allocator");
  if (in_forked_child()) return check_freed_in_child(*block);
  allocator.device_at(device_of_pool(block->pool)).stats.allocated -=
      static_cast<std::int64_t>(block->size);
  allocator.cache_.recycle(block);
}

void DeviceAllocator::trim(std::int64_t device) {
  const auto bytes =
      cache_.trim([device](std::int64_t pool) { return device_of_pool(pool) == device; });
  device_at(device).stats.reserved -= static_cast<std::int64_t>(bytes);
}

bool DeviceAllocator::has_room(c10::DeviceIndex device, std::size_t size) {
  const auto& [stats, limit] = device_at(device);
  return !limit || stats.reserved + static_cast<std::int64_t>(size) <= *limit;
}

// As CUDA's allocator, which waits for the events of blocks in use by streams, and then for the
// device when it gives blocks back.
void DeviceAllocator::wait_for_unused(c10::DeviceIndex device, std::size_t size,
                                      std::unique_lock<std::mutex>& lock) {
  if (has_room(device, size)) return;
  trim(device);
  const auto& [stats, limit] = device_at(device);
  const bool would_help = stats.allocated + static_cast<std::int64_t>(size) <= *limit;
  if (has_room(device, size) || !would_help) return;
  const auto pending =
      cache_.pending_uses([device](std::int64_t pool) { return device_of_pool(pool) == device; });
  lock.unlock();  // the streams' work may free memory
  for (const Point& point : pending) point.stream->reach(point.position);
  lock.lock();
  trim(device);
}

Block* DeviceAllocator::allocate_block(c10::DeviceIndex device, std::int64_t pool,
                                       std::size_t size) {
  auto& state = device_at(device);
  const auto wanted = static_cast<std::int64_t>(size);
  auto* const block = has_room(device, size) ? cache_.allocate(pool, size) : nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "sim:", int{device},
                   " is out of memory: tried to allocate ", wanted, " bytes with ",
                   state.stats.reserved, " reserved, of which ", state.stats.allocated,
                   " are in use", state.limit ? ", and a limit of " : "",
                   state.limit ? std::to_string(*state.limit) : std::string());
  state.stats.reserved += wanted;
  state.stats.peak_reserved = std::max(state.stats.peak_reserved, state.stats.reserved);
  return block;
}

}  // namespace tdcopier::sim
