// Gathers the chunks of a range on the source device, straight to where they go or into scratch
// memory, from which it enqueues one transfer for each chunk.
#include "engine/jobs/from_device_job.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
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
  std::vector<ChunkAt> contiguous;  // of ranges that are next to each other
  const auto transfer_contiguous = [&] {
    transfer(contiguous);
    contiguous.clear();
  };
  for (const auto& [first, last, by] : ranges_) {
    if (by == ChunkRange::By::kTransfer) {
      const Leaf& leaf = leaves_[plan_.order[plan_.chunks[first].first]];
      contiguous.push_back({first, static_cast<const std::byte*>(leaf.data)});
      continue;
    }
    transfer_contiguous();
    if (by == ChunkRange::By::kKernel) {
      gather_straight(first, last);
      note_gathered(last);
    } else {
      gather_and_transfer(first, last);
    }
  }
  transfer_contiguous();
}

void FromDeviceJob::gather_and_transfer(size_t first, size_t last) {
  // Chunks keep their offset in a cache line, so that elements stay aligned.
  const uint64_t begin = plan_.chunks[first].begin / kLineBytes * kLineBytes;
  // Freed in the order of this stream, so that the next range can reuse it.
  const c10::Storage scratch =
      allocate_on_device(source_.device(), plan_.chunks[last - 1].end() - begin);
  std::vector<std::byte*> at;
  std::vector<ChunkAt> gathered;
  for (size_t i = first; i < last; ++i) {
    at.push_back(static_cast<std::byte*>(scratch.mutable_data()) + plan_.chunks[i].begin - begin);
    gathered.push_back({i, at.back()});
  }
  {
    const PhaseRange range(phases_, Phase::kStage);
    gather(*read_stream_, plan_, leaves_, {first, last, at});
  }
  note_gathered(last);
  transfer(gathered);
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

void FromDeviceJob::transfer(std::span<const ChunkAt> chunks) {
  if (chunks.empty()) return;
  const PhaseRange range(phases_, Phase::kEnqueue);
  if (target_.is_cpu()) return transfer_to_host(chunks);
  while (!chunks.empty()) {
    const auto needs_scratch = [this](const ChunkAt& at) {
      return !work_.result && work_.to[at.chunk] == nullptr;
    };
    const auto straight =
        static_cast<size_t>(std::ranges::find_if(chunks, needs_scratch) - chunks.begin());
    if (straight != 0) transfer_between(chunks.first(straight));
    chunks = chunks.subspan(straight);
    if (chunks.empty()) return;
    transfer_through_scratch(chunks.front());
    chunks = chunks.subspan(1);
  }
}

void FromDeviceJob::transfer_to_host(std::span<const ChunkAt> chunks) {
  if (!pinned_) {
    for (const auto& [chunk, from] : chunks) {
      const uint64_t bytes = plan_.chunks[chunk].bytes;
      copy_to_pageable(*read_stream_, work_.result->address(chunk), from, bytes);
      count_transfer(bytes);
    }
    return;
  }
  std::vector<Transfer> transfers;
  for (const auto& [chunk, from] : chunks)
    transfers.push_back({work_.result->address(chunk), from, plan_.chunks[chunk].bytes});
  const auto note_all_written = [&] {
    for (const ChunkAt& at : chunks) note_written(at.chunk, at.chunk + 1);
  };
  try {
    enqueue_to_host(*read_stream_, transfers);
  } catch (...) {
    note_all_written();  // some may be in flight
    throw;
  }
  note_all_written();
  for (const Transfer& transfer : transfers) count_transfer(transfer.bytes);
}

void FromDeviceJob::transfer_between(std::span<const ChunkAt> chunks) {
  std::vector<Transfer> transfers;
  for (const auto& [chunk, from] : chunks) {
    std::byte* const to = work_.result ? work_.result->address(chunk) : work_.to[chunk];
    transfers.push_back({to, from, plan_.chunks[chunk].bytes});
  }
  if (!may_write_) let_read_stream_write();
  const auto is_writable = [this](const Transfer& transfer) {
    return can_write_peer(source_.device(), target_, transfer.to, transfer.bytes);
  };
  for (std::span<const Transfer> left(transfers); !left.empty();) {
    const auto writable =
        static_cast<size_t>(std::ranges::find_if_not(left, is_writable) - left.begin());
    // One that is not writable goes alone, by torch's copy, after which the others may be.
    const auto next = left.first(std::max<size_t>(writable, 1));
    enqueue_between(stream_, *read_stream_, next, writable != 0);
    for (const Transfer& transfer : next) count_transfer(transfer.bytes);
    left = left.subspan(next.size());
  }
}

void FromDeviceJob::transfer_through_scratch(const ChunkAt& at) {
  const uint64_t bytes = plan_.chunks[at.chunk].bytes;
  c10::Storage scratch;
  {
    const c10::StreamGuard on_target_stream(stream_);
    scratch = allocate_on_device(target_, bytes);
  }
  auto* const to = static_cast<std::byte*>(scratch.mutable_data());
  let_read_stream_write();  // to this memory, too
  const Transfer transfer{to, at.from, bytes};
  const bool is_writable = can_write_peer(source_.device(), target_, to, bytes);
  try {
    enqueue_between(stream_, *read_stream_, {&transfer, 1}, is_writable);
  } catch (...) {
    join_read_stream();  // before it is freed
    throw;
  }
  count_transfer(bytes);
  join_read_stream();
  std::byte* const there[] = {to};
  scatter(stream_, plan_, leaves_, work_.destinations, {at.chunk, at.chunk + 1, there});
}

}  // namespace tdcopier
