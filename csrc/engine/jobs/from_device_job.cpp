// Gathers the chunks of a range on the source device, straight to where they go or into scratch
// memory, from which it enqueues one transfer for each chunk.
#include "engine/jobs/from_device_job.h"

#include <c10/core/StreamGuard.h>

#include <utility>
#include <vector>

#include "base/cache_line.h"
#include "engine/device/events.h"
#include "engine/device/peer_memory.h"
#include "engine/moves/enqueue_transfers.h"
#include "engine/moves/gather_scatter.h"

namespace tdcopier {
namespace {

// Returns the accelerator of the stream that the arrival is recorded on.
Accelerator& arrival_accelerator(Accelerator& source, c10::Device target) {
  return target.is_cpu() ? source : Accelerator::of(target);
}

// Returns the stream that the arrival is recorded on.
const c10::Stream& arrival_stream(Accelerator& source, c10::Device target) {
  return target.is_cpu() ? source.from_device_stream() : Accelerator::of(target).ordered_stream();
}

// Work within a device is in the order of one stream.
const c10::Stream& read_stream(Accelerator& source, c10::Device target) {
  return source.device() == target ? source.ordered_stream() : source.from_device_stream();
}

}  // namespace

FromDeviceJob::FromDeviceJob(Accelerator& source, c10::Device target, CopyWork work, bool pinned,
                             std::vector<ChunkRange> ranges)
    : CopyJob(arrival_accelerator(source, target), arrival_stream(source, target),
              &read_stream(source, target), target, std::move(work)),
      source_(source),
      pinned_(pinned),
      ranges_(std::move(ranges)),
      within_(source.device() == target),
      between_(!within_ && !target.is_cpu()),
      sources_ready_(source.record_current()),
      destinations_ready_(work_.result ? nullptr : accelerator_.record_current()) {}

void FromDeviceJob::transfer_all() {
  // Wait here, because a transfer to pageable memory cannot be interrupted.
  if (target_.is_cpu() && !pinned_) wait_until_ended(*sources_ready_);
  const c10::StreamGuard on_target_stream(stream_);
  const c10::StreamGuard on_source_stream(*read_stream_);
  sources_ready_->block(*read_stream_);
  if (destinations_ready_) destinations_ready_->block(stream_);
  if (within_ && !work_.result) {
    const PhaseRange range(phases_, Phase::kEnqueue);
    copy_within(stream_, leaves_, work_.destinations);
    arrived_ = accelerator_.events().record_or_wait(stream_);
    return;
  }
  if (!between_) return transfer_ranges();
  try {
    transfer_ranges();
  } catch (...) {
    join_read_stream();  // some transfers may be in flight
    throw;
  }
  join_read_stream();
}

void FromDeviceJob::let_read_stream_write() {
  accelerator_.events().record(stream_)->block(*read_stream_);
  may_write_ = true;
}

void FromDeviceJob::join_read_stream() {
  const EventRef written = source_.events().record_or_wait(*read_stream_);
  if (written) written->block(stream_);
}

void FromDeviceJob::transfer_ranges() {
  for (const auto& [first, last, by] : ranges_) {
    if (by == ChunkRange::By::kKernel) {
      gather_straight(first, last);
      note_gathered(last);
    } else if (by == ChunkRange::By::kScratch) {
      gather_and_transfer(first, last);
    } else {
      const Leaf& leaf = leaves_[plan_.order[plan_.chunks[first].first]];
      transfer(first, static_cast<const std::byte*>(leaf.data));
    }
  }
}

void FromDeviceJob::gather_and_transfer(size_t first, size_t last) {
  // Chunks keep their offset in a cache line, so that elements stay aligned.
  const uint64_t begin = plan_.chunks[first].begin / kLineBytes * kLineBytes;
  // Freed in the order of this stream, so that the next range can reuse it.
  const c10::Storage scratch =
      allocate_on_device(source_.device(), plan_.chunks[last - 1].end() - begin);
  std::vector<std::byte*> at;
  for (size_t i = first; i < last; ++i) {
    at.push_back(static_cast<std::byte*>(scratch.mutable_data()) + plan_.chunks[i].begin - begin);
  }
  {
    const PhaseRange range(phases_, Phase::kStage);
    gather(*read_stream_, plan_, leaves_, {first, last, at});
  }
  note_gathered(last);
  for (size_t i = first; i < last; ++i) transfer(i, at[i - first]);
}

// Nothing after the last gather reads a source again.
void FromDeviceJob::note_gathered(size_t last) {
  if (last != plan_.chunks.size()) return;
  note_sources_free(source_.events().record_or_wait(*read_stream_));
}

void FromDeviceJob::gather_straight(size_t first, size_t last) {
  const PhaseRange range(phases_, Phase::kStage);
  if (between_ && !may_write_) let_read_stream_write();
  std::vector<std::byte*> at;
  for (size_t i = first; i < last; ++i) at.push_back(work_.result->address(i));
  size_t launches = 0;
  try {
    launches = gather(*read_stream_, plan_, leaves_, {first, last, at});
  } catch (...) {
    note_written(first, last);  // some kernels may be in flight
    throw;
  }
  note_written(first, last);
  uint64_t bytes = 0;
  for (size_t i = first; i < last; ++i) bytes += plan_.chunks[i].bytes;
  // Each kernel counts as one transfer, for any number of chunks.
  for (size_t i = 0; i < launches; ++i) count_transfer(i == 0 ? bytes : 0);
}

// Tells the pinned allocator that the stream writes these chunks. If that fails, waits for the
// stream: the memory must not be freed before it is written. Memory of a device is freed in the
// order of its stream.
void FromDeviceJob::note_written(size_t first, size_t last) {
  if (!target_.is_cpu()) return;
  try {
    for (size_t i = first; i < last; ++i) work_.result->note_written(i, *read_stream_);
  } catch (...) {
    read_stream_->synchronize();
    throw;
  }
}

void FromDeviceJob::transfer(size_t index, const std::byte* from) {
  const PhaseRange range(phases_, Phase::kEnqueue);
  const ChunkPlan& chunk = plan_.chunks[index];
  if (target_.is_cpu()) {
    std::byte* const to = work_.result->address(index);
    if (pinned_) {
      enqueue_to_host(*read_stream_, to, from, chunk.bytes);
      note_written(index, index + 1);
    } else {
      copy_to_pageable(*read_stream_, to, from, chunk.bytes);
    }
    return count_transfer(chunk.bytes);
  }
  c10::Storage scratch;
  std::byte* to = work_.result ? work_.result->address(index) : work_.to[index];
  if (to == nullptr) {
    const c10::StreamGuard on_target_stream(stream_);
    scratch = allocate_on_device(target_, chunk.bytes);
    to = static_cast<std::byte*>(scratch.mutable_data());
    may_write_ = false;  // not yet to this memory
  }
  if (!may_write_) let_read_stream_write();
  const bool is_writable = can_write_peer(source_.device(), target_, to, chunk.bytes);
  try {
    enqueue_between(stream_, to, *read_stream_, from, chunk.bytes, is_writable);
  } catch (...) {
    if (scratch) join_read_stream();  // before it is freed
    throw;
  }
  count_transfer(chunk.bytes);
  if (scratch) {
    join_read_stream();
    std::byte* const at[] = {to};
    scatter(stream_, plan_, leaves_, work_.destinations, {index, index + 1, at});
  }
}

}  // namespace tdcopier
