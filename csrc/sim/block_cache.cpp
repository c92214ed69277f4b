// Reuses memory blocks in the order of the streams' work.
#include "sim/block_cache.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "sim/runtime.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

// Fresh system memory is often zero, which a test may expect by accident; these patterns are not.
constexpr int kFreshByte = 0xA5;
constexpr int kFreedByte = 0xDD;

std::atomic<bool> poison_at_allocation{true};
std::atomic<bool> poison_at_free{false};

// Blocks of whole pages often stand side by side, as those of a driver do: code that takes two
// neighbours for one allocation is found.
bool is_whole_pages(std::size_t size) {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return size % page == 0;
}

// Returns null if the system has none.
void* system_memory(std::size_t size) {
  if (!is_whole_pages(size)) return std::aligned_alloc(kBlockBytes, size);
  void* const mapped =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

void free_system_memory(void* data, std::size_t size) {
  if (is_whole_pages(size)) {
    ::munmap(data, size);
  } else {
    std::free(data);
  }
}

}  // namespace

Poison exchange_poison(Poison poison) {
  return {poison_at_allocation.exchange(poison.at_allocation),
          poison_at_free.exchange(poison.at_free)};
}

std::size_t rounded_size(std::size_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

void check_freed_in_child(const Block& block) {
  TORCH_CHECK(block.users.empty(),
              "simulated device error: initialization error: a forked child frees memory with a "
              "recorded stream");
}

Block* BlockCache::reuse(std::int64_t pool, std::size_t size) {
  sweep();
  const auto found = free_.find({pool, size});
  if (found == free_.end() || found->second.empty()) return nullptr;
  Block* const block = found->second.back();
  found->second.pop_back();
  block->seen_until.clear();
  return block;
}

Block* BlockCache::allocate(std::int64_t pool, std::size_t size) {
  // A system that overcommits memory would kill the process when it writes to the block.
  constexpr std::size_t kMoreThanAnyDeviceHas = std::size_t{1} << 40;
  if (size > kMoreThanAnyDeviceHas) return nullptr;
  void* const data = system_memory(size);
  if (data == nullptr) return nullptr;
  if (poison_at_allocation.load(std::memory_order_relaxed)) std::memset(data, kFreshByte, size);
  auto block = std::make_unique<Block>();
  block->data = data;
  block->size = size;
  block->pool = pool;
  Block* const result = block.get();
  blocks_.emplace(reinterpret_cast<std::uintptr_t>(data), std::move(block));
  return result;
}

void BlockCache::recycle(Block* block) {
  block->in_use = false;
  if (Tracker::is_on()) {
    Tracker::get().given_back(*block);
    block->done_at_free = Tracker::get().end_of_all(block->users);
  }
  for (StreamQueue* const user : block->users) {
    block->in_use_until.push_back(Point{user, user->last()});
  }
  block->users.clear();
  if (block->owner != nullptr) block->freed_at = Point{block->owner, block->owner->last()};
  block->seen_until = all_pending_work();
  waiting_.push_back(block);
  sweep();
}

Block* BlockCache::starting_at(const void* data) const {
  const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
  return found == blocks_.end() ? nullptr : found->second.get();
}

Block* BlockCache::containing(const void* data) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  const auto& [start, block] = *--next;
  return address < start + block->size ? block.get() : nullptr;
}

std::optional<Place> BlockCache::place_of(const void* data) const {
  const auto* const block = containing(data);
  if (block == nullptr) return std::nullopt;
  return Place{reinterpret_cast<std::uintptr_t>(block->data), block->size, block->in_use};
}

bool BlockCache::all_passed(std::vector<Point>& points) {
  std::erase_if(points, [](const Point& point) { return point.passed(); });
  return points.empty();
}

void BlockCache::sweep() {
  std::erase_if(waiting_, [&](Block* block) {
    if (!all_passed(block->in_use_until)) return false;
    if (poison_at_free.load(std::memory_order_relaxed)) poison(block);
    free_[{block->pool, block->size}].push_back(block);
    return true;
  });
}

void BlockCache::poison(Block* block) {
  if (block->freed_at.passed()) {
    std::memset(block->data, kFreedByte, block->size);
    return;
  }
  const auto position = block->owner->append({"poison", [data = block->data, size = block->size] {
                                                std::memset(data, kFreedByte, size);
                                              }});
  block->seen_until.push_back(Point{block->owner, position});  // it stays mapped until then
}

void BlockCache::forget(Block* block) {
  if (Tracker::is_on()) Tracker::get().forgotten(*block);
  free_system_memory(block->data, block->size);
  blocks_.erase(reinterpret_cast<std::uintptr_t>(block->data));
}

}  // namespace tdcopier::sim
