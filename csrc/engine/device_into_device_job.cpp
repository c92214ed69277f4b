// Between devices: gather, transfer to each run, or to a chunk that is scattered. Within one: a
// copy of each leaf.
#include "engine/device_into_device_job.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "engine/gather.h"
#include "engine/scatter.h"
#include "engine/transport.h"

namespace tdcopier {
namespace {

size_t count_scattered(const std::vector<ChunkRuns>& chunks) {
  return static_cast<size_t>(std::count_if(chunks.begin(), chunks.end(),
                                           [](const ChunkRuns& chunk) { return chunk.scattered; }));
}

}  // namespace

DeviceIntoDeviceJob::DeviceIntoDeviceJob(Accelerator& source, Accelerator& target, LeafPairs pairs,
                                         IntoPlan plan, IntoHolds holds, ThreadPool& reclaimer)
    : IntoJob(target, target.ordered_stream(), target.device(), std::move(pairs),
              std::move(plan.pack), std::move(holds), reclaimer),
      source_(source),
      reads_(&source == &target ? target.ordered_stream() : source.from_device_stream()),
      runs_(std::move(plan.runs)),
      chunk_runs_(std::move(plan.chunks)),
      scattered_(&source == &target ? 0 : count_scattered(chunk_runs_)),
      written_(source.record_current()),
      used_(target.record_current()) {}

void DeviceIntoDeviceJob::transfer_all() {
  const c10::StreamGuard on_target_stream(stream_);
  const c10::StreamGuard on_source_stream(reads_);
  written_->block(reads_);
  used_->block(stream_);
  if (&source_ == &accelerator_) {
    const StepRange range(steps_, Step::kEnqueue);
    copy_within(source_, leaves_, destinations_);
    arrived_ = source_.events().record(reads_);
    read_ = arrived_;
    return;
  }
  for (size_t i = 0; i < plan_.chunks.size(); ++i) transfer(i);
  read_ = source_.events().record(reads_);
}

void DeviceIntoDeviceJob::transfer(size_t chunk) {
  const ChunkPlan& plan = plan_.chunks[chunk];
  const uint32_t first = plan_.order[plan.first];
  if (plan.last - plan.first == 1 && !leaves_[first].strided) {
    const auto* data = static_cast<const std::byte*>(leaves_[first].data);
    send(plan, chunk_runs_[chunk], data - plan_.slots[first].offset);
    return;
  }
  // Freed on this stream, in whose order the next chunk uses it again.
  const Chunk gathered =
      allocate_chunk(c10::GetAllocator(source_.device().type()), source_.device(), plan);
  {
    const StepRange range(steps_, Step::kStage);
    gather(source_, reads_, plan_, plan, leaves_, gathered.at(0));
  }
  send(plan, chunk_runs_[chunk], gathered.at(0));
}

void DeviceIntoDeviceJob::send(const ChunkPlan& plan, const ChunkRuns& runs,
                               const std::byte* image) {
  const StepRange range(steps_, Step::kEnqueue);
  ByteViewPool::Lease from = source_.views().take();
  ByteViewPool::Lease to = accelerator_.views().take();
  const auto counted = [&](const std::byte* address, std::byte* destination, uint64_t bytes) {
    enqueue_between(*from, address, *to, destination, bytes);
    count_transfer(bytes);
  };
  for (uint32_t i = runs.first; i < runs.last; ++i) {
    counted(image + runs_[i].offset, runs_[i].to, runs_[i].bytes);
  }
  if (!runs.scattered) return;
  // Its image begins with its first slot, so that a leaf that was not gathered is all of it.
  const Chunk arrived = allocate_on_target(plan);
  counted(image, arrived.at(0), plan.bytes);
  scatter(accelerator_, stream_, plan_, plan, leaves_, destinations_, arrived.at(0));
}

Chunk DeviceIntoDeviceJob::allocate_on_target(const ChunkPlan& plan) {
  const c10::StreamGuard on_target_stream(stream_);
  return allocate_chunk(c10::GetAllocator(target_.type()), target_, plan);
}

void DeviceIntoDeviceJob::finish_reading() noexcept {
  give_back_sources_behind(source_, reads_);
  give_back_destinations();
}

void DeviceIntoDeviceJob::order_behind_reads(const c10::Stream& stream) {
  if (read_) block_until_ended(*read_, stream);
}

}  // namespace tdcopier
