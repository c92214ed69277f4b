#include "engine/channels/message_pool.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <iterator>
#include <utility>

namespace tdcopier {
namespace {

constexpr uint64_t kMessageStepBytes = 4096;

// At most a quarter more, in whole pages, for a message that is a little larger.
uint64_t with_room(uint64_t bytes) {
  const uint64_t step =
      std::max(std::bit_floor(std::max<uint64_t>(bytes, 1)) / 4, kMessageStepBytes);
  return (bytes + step - 1) / step * step;
}

bool is_free(const c10::Storage& piece) {
  if (piece.use_count() != 1) return false;
  // That read is relaxed; what the last other user did is before the next use.
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

}  // namespace

c10::Storage MessagePool::take(uint64_t bytes) {
  const auto fits = [bytes](const c10::Storage& piece) {
    return is_free(piece) && piece.nbytes() >= bytes;
  };
  if (const auto found = std::ranges::find_if(pieces_, fits); found != pieces_.end()) return *found;
  auto unfit = std::ranges::find_if(pieces_, is_free);  // too small
  if (unfit == pieces_.end() && pieces_.size() >= most_) unfit = pieces_.begin();
  c10::Storage made = make(std::max(bytes, kMessageStepBytes));
  if (unfit != pieces_.end()) {
    retired_.push_back(std::move(*unfit));
    pieces_.erase(unfit);
  }
  ++allocations_;
  pieces_.push_back(made);
  return made;
}

size_t MessagePool::in_use() const {
  return pieces_.size() - static_cast<size_t>(std::ranges::count_if(pieces_, is_free));
}

std::vector<c10::Storage> MessagePool::retired() {
  return std::exchange(retired_, {});
}

std::vector<c10::Storage> MessagePool::all() {
  std::vector<c10::Storage> found = retired();
  std::ranges::move(std::exchange(pieces_, {}), std::back_inserter(found));
  return found;
}

c10::Storage MessagePool::make(uint64_t bytes) const {
  c10::Allocator* const allocator =
      pinned_for_ ? static_cast<c10::Allocator*>(at::getHostAllocator(*pinned_for_))
                  : c10::GetCPUAllocator();
  const uint64_t size = with_room(bytes);
  return {c10::Storage::use_byte_size_t(), size, allocator->allocate(size), allocator,
          /*resizable=*/true};
}

}  // namespace tdcopier
