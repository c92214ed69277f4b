// Leases large results on the host, and makes all others with torch's allocators.
#include "engine/jobs/result_memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <utility>

#include "base/forks.h"
#include "engine/device/accelerator.h"
#include "engine/device/fallbacks.h"
#include "engine/jobs/rows_job.h"
#include "engine/leaves/result.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_least_leased_bytes = kLeastLeasedResultBytes;

// Chunks of a leased result that are smaller than this part of the least one are made with torch's
// allocator, which is faster for them.
constexpr uint64_t kPartOfLeastLeased = 64;

void make_result(CopyWork& work, const MemoryOf& memory) {
  auto result = std::make_shared<Result>(memory, work.leaves, work.plan);
  result->allocate();
  work.result = std::move(result);
}

// Makes a large result of a device in leased memory. Returns whether it did: the pool may have no
// room, or the driver refuse to pin. Waits for no device: torch's allocator may have memory.
bool lease_result(LeafGroup& group, c10::Allocator* pinned) {
  const c10::Device source = group.work.leaves->device();
  const uint64_t least = g_least_leased_bytes;
  if (group.work.plan->total_bytes < least || group.image || fork_generation() != 0) return false;
  try {
    make_result(group.work, {.device = group.target,
                             .host_allocator = pinned,
                             .leasing = Leasing{source, least / kPartOfLeastLeased}});
    return true;
  } catch (const std::runtime_error&) {
    note_fallback();
    return false;
  }
}

}  // namespace

void set_least_leased_bytes(uint64_t bytes) {
  g_least_leased_bytes = bytes;
}

void make_result_on_device(LeafGroup& group, bool in_callers_order) {
  Accelerator& target = Accelerator::of(group.target);
  if (in_callers_order) {
    return make_result(group.work, {.device = group.target, .writer = &target.ordered_stream()});
  }
  const bool waits = !group.work.leaves->device().is_cpu() || rows_of(group.work).on_device;
  const c10::Stream& stream = waits ? target.ordered_stream() : target.to_device_stream();
  make_result(group.work, {.device = group.target, .stream = &stream});
}

bool make_result_on_host(LeafGroup& group, const RouteOptions& options) {
  const c10::Device source = group.work.leaves->device();
  c10::Allocator* pinned = group.pinned_memory;
  if (!source.is_cpu() && options.use_pinned_staging) pinned = at::getHostAllocator(source.type());
  if (pinned == nullptr && options.requires_pinned_results) {
    throw std::runtime_error(
        "require_pinned_results=True: no memory can be pinned here, because this process has "
        "used no accelerator, or is a forked child");
  }
  try {
    if (pinned != nullptr && !source.is_cpu() && lease_result(group, pinned)) return true;
    make_result(group.work, {.device = group.target,
                             .host_allocator = pinned,
                             .image = group.image,
                             .image_begin = group.image_begin});
    return pinned != nullptr;
  } catch (const c10::Error& error) {
    const bool is_required = pinned == nullptr || options.requires_pinned_results;
    if (is_required || !is_lack_of_memory(error)) throw;
  }
  note_fallback();
  make_result(group.work, {.device = group.target});
  return false;
}

}  // namespace tdcopier
