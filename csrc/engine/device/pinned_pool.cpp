// Best fit among the free ranges, and events for ranges that came back while a device may use them.
#include "engine/device/pinned_pool.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>

#include "base/polling_wait.h"

namespace tdcopier {
namespace {

uint64_t half_of_the_machines_memory() {
  return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * page_bytes() / 2;
}

std::atomic<uint64_t>& pinned_limit_bytes() {
  static std::atomic<uint64_t> bytes = half_of_the_machines_memory();
  return bytes;
}

}  // namespace

PinnedBlock::PinnedBlock(c10::Device device, AnonymousMemory memory)
    : memory_(std::move(memory)),
      pinned_(device, std::vector<PinnedRanges::Range>{memory_.bytes()}) {}

PinnedBlock::~PinnedBlock() {
  const InterruptibleWaits to_the_end(nullptr);
  if (pinned_.is_of_this_process()) pinned_.end_use();
}

PinnedPool& PinnedPool::get() {
  static std::atomic<PinnedPool*> current = new PinnedPool();
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current = new PinnedPool(); });
  (void)registered;
  return *current;
}

void PinnedPool::set_limit_bytes(uint64_t bytes) {
  pinned_limit_bytes() = bytes;
}

uint64_t PinnedPool::limit_bytes() {
  return pinned_limit_bytes();
}

std::vector<uintptr_t> PinnedPool::take(std::span<const size_t> sizes, bool waits) {
  const uint64_t wanted = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  for (;;) {
    std::vector<EventRef> next;
    Blocks dropped;  // given to the system once the lock is released
    {
      const std::lock_guard lock(mutex_);
      collect();
      if (auto taken = take_within_limit(sizes, dropped)) return std::move(*taken);
      if (waits) next = next_return(wanted);
      if (next.empty()) refuse(sizes);
    }
    for (const EventRef& event : next) wait_until_ended(*event);
  }
}

// The largest sizes choose first, so that none of their ranges is divided for a small one.
std::optional<std::vector<uintptr_t>> PinnedPool::take_within_limit(std::span<const size_t> sizes,
                                                                    Blocks& dropped) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&](size_t i) { return sizes[i]; });
  std::vector<uintptr_t> taken(sizes.size());
  uint64_t missing = 0;
  for (const size_t i : order) {
    if (sizes[i] == 0) continue;
    taken[i] = ranges_.take(sizes[i]).value_or(0);
    if (taken[i] == 0) missing += sizes[i];
  }
  const uint64_t limit = limit_bytes();
  if (missing != 0 && bytes_ + missing > limit) {
    // Only if that is enough: otherwise nothing is gained.
    std::vector<MemoryRange> idle = ranges_.idle_blocks();
    std::ranges::sort(idle, std::greater(), &MemoryRange::bytes);
    uint64_t all_idle = 0;
    for (const MemoryRange& block : idle) all_idle += block.bytes;
    if (bytes_ - all_idle + missing > limit) {
      for (size_t i = 0; i < sizes.size(); ++i) {
        if (taken[i] != 0) ranges_.give_back({taken[i], sizes[i]});
      }
      return std::nullopt;
    }
    for (const MemoryRange& block : idle) {
      if (bytes_ + missing <= limit) break;
      drop(block, dropped);
    }
  }
  bytes_ += missing;
  return taken;
}

uint64_t PinnedPool::drop(MemoryRange idle, Blocks& dropped) {
  const auto found = blocks_.find(idle.begin);
  dropped.push_back(std::move(found->second));
  blocks_.erase(found);
  ranges_.remove_block(idle.begin);
  bytes_ -= idle.bytes;
  return idle.bytes;
}

// Returns the events of the next range to come back; none if even all of them would not be enough.
std::vector<EventRef> PinnedPool::next_return(uint64_t wanted) const {
  uint64_t leased = bytes_ - ranges_.free_bytes();
  for (const Returned& each : returned_) leased -= each.range.bytes;
  if (leased + wanted > limit_bytes()) return {};
  const auto found = std::ranges::find(returned_, true, &Returned::has_events);
  return found == returned_.end() ? std::vector<EventRef>() : found->events;
}

void PinnedPool::refuse(std::span<const size_t> sizes) const {
  const uint64_t wanted = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  throw PinnedMemoryError(
      std::to_string(wanted) + " bytes of pinned memory exceed the pool's limit of " +
      std::to_string(limit_bytes()) + " bytes: " + std::to_string(bytes_ - ranges_.free_bytes()) +
      " are leased, and " + std::to_string(ranges_.free_bytes()) +
      " are free, the largest piece of them " + std::to_string(ranges_.largest_free()) +
      "; drop leased tensors, or raise the limit with tdcopier.limits.set_pinned_bytes()");
}

void PinnedPool::adopt(std::unique_ptr<PinnedBlock> block) {
  const MemoryRange range = block->range();
  const std::lock_guard lock(mutex_);
  ranges_.add_block(range);
  blocks_.emplace(range.begin, std::move(block));
}

void PinnedPool::cancel(size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  bytes_ -= bytes;
}

void PinnedPool::give_back(MemoryRange range) noexcept {
  const std::lock_guard lock(mutex_);
  ranges_.give_back(range);
}

void PinnedPool::begin_use(MemoryRange range) {
  const std::lock_guard lock(mutex_);
  in_use_.insert_or_assign(range.begin, InUse{range.bytes, {}});
}

bool PinnedPool::note_use(const void* address, const c10::Stream& stream) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  auto after = in_use_.upper_bound(at);
  if (after == in_use_.begin()) return false;
  auto& [begin, range] = *std::prev(after);
  if (at - begin >= range.bytes) return false;
  if (std::ranges::find(range.streams, stream) == range.streams.end()) {
    range.streams.push_back(stream);
  }
  return true;
}

// Does not look at the others: a tree of many tensors may be dropped while a device is at work.
void PinnedPool::give_back_after_work(MemoryRange range, c10::DeviceType type) noexcept {
  const std::lock_guard lock(mutex_);
  Returned returned{range, type, {}, false, {}};
  if (auto used = in_use_.extract(range.begin)) returned.streams = std::move(used.mapped().streams);
  if (has_come_back(returned)) {
    ranges_.give_back(range);
  } else {
    returned_.push_back(std::move(returned));
  }
}

// Returns whether it knows all work. If not, the range stays taken, and the next call tries again.
bool PinnedPool::record_events(Returned& returned) noexcept {
  auto events = current_work_.record(returned.type, returned.streams);
  if (events) returned.events = std::move(*events);
  return events.has_value();
}

bool PinnedPool::has_come_back(Returned& returned) noexcept {
  if (!returned.has_events) returned.has_events = record_events(returned);
  if (!returned.has_events) return false;
  std::erase_if(returned.events, [](const EventRef& event) { return has_ended(*event); });
  return returned.events.empty();
}

void PinnedPool::collect() noexcept {
  for (auto entry = returned_.begin(); entry != returned_.end();) {
    const auto here = entry++;
    if (!has_come_back(*here)) continue;
    ranges_.give_back(here->range);
    returned_.erase(here);
  }
}

uint64_t PinnedPool::trim() {
  Blocks dropped;
  uint64_t bytes = 0;
  const std::lock_guard lock(mutex_);
  collect();
  for (const MemoryRange& block : ranges_.idle_blocks()) bytes += drop(block, dropped);
  return bytes;
}

PinnedPool::Bytes PinnedPool::bytes() {
  const std::lock_guard lock(mutex_);
  collect();
  return {bytes_ - ranges_.free_bytes(), ranges_.free_bytes()};
}

uint64_t PinnedPool::largest_free_bytes() {
  const std::lock_guard lock(mutex_);
  collect();
  return ranges_.largest_free();
}

}  // namespace tdcopier
