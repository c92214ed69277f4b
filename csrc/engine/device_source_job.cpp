// Chunk by chunk on the source's copy stream: gather, then one transfer.
#include "engine/device_source_job.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "engine/gather.h"
#include "engine/graph_capture.h"
#include "engine/reclaim.h"
#include "engine/segment_kernel.h"
#include "engine/transport.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_max_straight_bytes = kMaxStraightBytes;

// The accelerator whose stream tells when all has arrived.
Accelerator& arrival(Accelerator& source, c10::Device target) {
  return target.is_cpu() ? source : Accelerator::of(target);
}

// The stream that does.
const c10::Stream& arrivals(Accelerator& source, c10::Device target) {
  return target.is_cpu() ? source.from_device_stream() : Accelerator::of(target).ordered_stream();
}

}  // namespace

void set_max_straight_bytes(uint64_t bytes) {
  g_max_straight_bytes = bytes;
}

DeviceSourceJob::DeviceSourceJob(Accelerator& source, c10::Device target, LeafTable leaves,
                                 std::shared_ptr<const PackPlan> plan, bool pinned,
                                 std::shared_ptr<SourceHold> sources, ThreadPool& reclaimer)
    : CopyJob(arrival(source, target), arrivals(source, target), target, std::move(leaves),
              std::move(plan), std::move(sources)),
      source_(source),
      reads_(source.from_device_stream()),
      pinned_(pinned),
      reclaimer_(reclaimer),
      written_(source.record_current()) {}

void DeviceSourceJob::allocate_chunks() {
  const c10::StreamGuard on_copy_stream(stream_);
  c10::Allocator* allocator = target_.is_cpu() && pinned_
                                  ? at::getHostAllocator(source_.device().type())
                                  : c10::GetAllocator(target_.type());
  chunks_.reserve(plan_.chunks.size());
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(allocate_chunk(allocator, target_, chunk));
  }
}

void DeviceSourceJob::transfer_all() {
  const c10::StreamGuard on_target_stream(stream_);
  const c10::StreamGuard on_source_stream(reads_);
  written_->block(reads_);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    if (plan_.chunks[i].bytes != 0) transfer(plan_.chunks[i], chunks_[i]);
  }
}

bool DeviceSourceJob::is_gathered_straight(const ChunkPlan& plan) const {
  if (!target_.is_cpu() || !pinned_ || plan.bytes > g_max_straight_bytes) return false;
  if (!has_segment_kernel(source_.device(), plan.bytes)) return false;
  return std::none_of(plan_.order.begin() + plan.first, plan_.order.begin() + plan.last,
                      [this](uint32_t leaf) { return leaves_[leaf].strided; });
}

void DeviceSourceJob::transfer(const ChunkPlan& plan, const Chunk& chunk) {
  const Leaf& first = leaves_[plan_.order[plan.first]];
  const bool in_place = plan.last - plan.first == 1 && !first.strided;
  if (in_place) {
    enqueue(first.data, chunk, plan.bytes);
  } else if (is_gathered_straight(plan)) {
    gather_straight(plan, chunk);
  } else {
    // Freed on this stream, in whose order the next chunk uses it again.
    const Chunk gathered =
        allocate_chunk(c10::GetAllocator(source_.device().type()), source_.device(), plan);
    gather_to(plan, gathered.at(0));
    note_gathered(plan);
    enqueue(gathered.at(0), chunk, plan.bytes);
  }
  count_transfer(plan.bytes);
}

void DeviceSourceJob::gather_to(const ChunkPlan& plan, std::byte* memory) {
  const StepRange range(steps_, Step::kStage);
  gather(source_, reads_, plan_, plan, leaves_, memory);
}

void DeviceSourceJob::gather_straight(const ChunkPlan& plan, const Chunk& chunk) {
  try {
    gather_to(plan, chunk.at(0));
  } catch (...) {
    note_written(reads_, chunk);  // some of it may be under way
    throw;
  }
  note_written(reads_, chunk);
  note_gathered(plan);
}

// Packed chunks come first: behind the last gather nothing reads a source again.
void DeviceSourceJob::note_gathered(const ChunkPlan& plan) {
  if (&plan == &plan_.chunks.back()) read_ = source_.events().record(reads_);
}

void DeviceSourceJob::enqueue(const void* address, const Chunk& chunk, uint64_t bytes) {
  const StepRange range(steps_, Step::kEnqueue);
  ByteViewPool::Lease views = source_.views().take();
  if (!target_.is_cpu()) {
    enqueue_between(*views, address, chunk, bytes);
  } else if (pinned_) {
    enqueue_to_pinned(reads_, *views, address, chunk, bytes);
  } else {
    copy_to_pageable(*views, address, chunk, bytes);
  }
}

void DeviceSourceJob::finish_reading() noexcept {
  try {
    const RelaxedCapture relaxed(source_.device().type());
    if (!read_) read_ = source_.events().record(reads_);
  } catch (...) {  // the device has failed: it reads no more, and get() says how
    sources_->give_back();
    return;
  }
  give_back_behind(read_, sources_, reclaimer_);
}

void DeviceSourceJob::order_behind_reads(const c10::Stream& stream) {
  if (read_) block_until_ended(*read_, stream);
}

}  // namespace tdcopier
