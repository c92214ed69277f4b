// Moves each window: a gather if necessary, one transfer, then the writes to its destinations.
#include "engine/jobs/into_host_job.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "engine/device/events.h"
#include "engine/device/pinned_ranges.h"
#include "engine/device/staging_ring.h"
#include "engine/moves/deliver.h"
#include "engine/moves/enqueue_transfers.h"
#include "engine/moves/gather_scatter.h"

namespace tdcopier {

IntoHostJob::IntoHostJob(Accelerator& source, CopyWork work, bool use_pinned_staging,
                         std::vector<size_t> straight, std::vector<Window> windows)
    : CopyJob(source, source.from_device_stream(), &source.from_device_stream(),
              c10::Device(c10::kCPU), std::move(work)),
      use_pinned_staging_(use_pinned_staging),
      straight_(std::move(straight)),
      windows_(std::move(windows)),
      sources_ready_(source.record_current()),
      unread_windows_(windows_.size()) {
  const c10::StreamGuard on_stream(stream_);
  sources_ready_->block(stream_);
  gathered_.resize(plan_.chunks.size());
  for (const Window& window : windows_) {
    for_each_chunk_in_window(plan_, window, [&](size_t i, uint64_t begin, uint64_t end, uint64_t) {
      const ChunkPlan& chunk = plan_.chunks[i];
      const bool is_first_of_several = begin == 0 && end != chunk.bytes;
      if (is_first_of_several && is_gathered(chunk)) gathered_[i] = gather_chunk(i);
    });
  }
}

bool IntoHostJob::is_gathered(const ChunkPlan& chunk) const {
  return chunk.last - chunk.first != 1 || leaves_[plan_.order[chunk.first]].strided;
}

// Waits with the caller's streams current, because signal handlers may run meanwhile.
void IntoHostJob::transfer_all() {
  while (!is_failing()) {
    interleave();
    const size_t claimed = claim();
    if (claimed >= windows_.size()) break;
    transfer(windows_[claimed]);
  }
}

void IntoHostJob::transfer(const Window& window) {
  for_each_chunk_in_window(plan_, window, [&](size_t chunk, uint64_t, uint64_t, uint64_t) {
    if (std::ranges::binary_search(straight_, chunk)) {
      transfer_straight(window, chunk);
    } else if (use_pinned_staging_) {
      transfer_staged(window, chunk);
    } else {
      transfer_pageable(window, chunk);
    }
  });
}

void IntoHostJob::transfer_straight(const Window& window, size_t chunk) {
  const uint32_t leaf = plan_.order[plan_.chunks[chunk].first];
  std::byte* const to = work_.destinations[leaf].data;
  if (!use_pinned_staging_)
    wait_until_ended(*sources_ready_);  // the transfer cannot be interrupted
  const PhaseRange range(phases_, Phase::kEnqueue);
  const c10::StreamGuard on_stream(stream_);
  const PinnedRanges::Access access;
  const auto* const from = static_cast<const std::byte*>(leaves_[leaf].data);
  if (PinnedRanges::find({to, window.bytes()}) == PinnedRanges::Found::kNot) {
    note_fallback();  // it is about to be unpinned, so the device must not write it
    const auto staged = std::make_unique_for_overwrite<std::byte[]>(
        std::min<uint64_t>(window.bytes(), kStagingBufferBytes));
    for (uint64_t begin = 0; begin < window.bytes(); begin += kStagingBufferBytes) {
      const uint64_t bytes = std::min<uint64_t>(window.bytes() - begin, kStagingBufferBytes);
      copy_to_pageable(stream_, staged.get(), from + begin, bytes);
      std::memcpy(to + begin, staged.get(), bytes);
    }
  } else if (use_pinned_staging_) {
    const Transfer transfer{to, from, window.bytes()};
    enqueue_to_host(stream_, {&transfer, 1});
  } else {
    copy_to_pageable(stream_, to, from, window.bytes());
  }
  note_read(window);
}

void IntoHostJob::transfer_staged(const Window& window, size_t chunk) {
  // Acquired before the gather, because it may take a while.
  std::optional<StagingLease> lease = accelerator_.staging().acquire(StagingUse::kFromDevice);
  if (!lease) {
    note_fallback();
    return transfer_pageable(window, chunk);
  }
  EventRef arrived;
  {
    const c10::StreamGuard on_stream(stream_);
    c10::Storage here;  // freed in stream order, so that the next window can reuse it
    const std::byte* const image = image_of(window, chunk, here);
    const PhaseRange range(phases_, Phase::kEnqueue);
    const Transfer transfer{lease->data(), image, window.bytes()};
    enqueue_to_host(stream_, {&transfer, 1});
    arrived = accelerator_.events().record_or_wait(stream_);
  }
  note_read(window);
  if (arrived) {
    try {
      wait_for(*arrived);
    } catch (const Interrupted&) {
      lease->in_flight_until(std::move(arrived));
      throw;
    }
  }
  deliver(window, lease->data());
}

void IntoHostJob::transfer_pageable(const Window& window, size_t chunk) {
  const auto staged = std::make_unique_for_overwrite<std::byte[]>(window.bytes());
  wait_until_ended(*sources_ready_);
  {
    const c10::StreamGuard on_stream(stream_);
    c10::Storage here;
    const std::byte* const image = image_of(window, chunk, here);
    const PhaseRange range(phases_, Phase::kEnqueue);
    copy_to_pageable(stream_, staged.get(), image, window.bytes());
  }
  note_read(window);
  deliver(window, staged.get());
}

void IntoHostJob::deliver(const Window& window, const std::byte* staged) {
  const PhaseRange range(phases_, Phase::kStage);
  deliver_window(plan_, leaves_, work_.destinations, window, staged);
}

const std::byte* IntoHostJob::image_of(const Window& window, size_t index, c10::Storage& here) {
  const ChunkPlan& chunk = plan_.chunks[index];
  const uint64_t offset = window.begin - chunk.begin;
  if (!is_gathered(chunk)) {
    return static_cast<const std::byte*>(leaves_[plan_.order[chunk.first]].data) + offset;
  }
  if (!gathered_[index]) here = gather_chunk(index);
  const c10::Storage& image = gathered_[index] ? gathered_[index] : here;
  return static_cast<const std::byte*>(image.data()) + offset;
}

c10::Storage IntoHostJob::gather_chunk(size_t index) {
  c10::Storage gathered = allocate_on_device(accelerator_.device(), plan_.chunks[index].bytes);
  const PhaseRange range(phases_, Phase::kStage);
  std::byte* const at[] = {static_cast<std::byte*>(gathered.mutable_data())};
  gather(stream_, plan_, leaves_, {index, index + 1, at});
  return gathered;
}

void IntoHostJob::note_read(const Window& window) {
  count_transfer(window.bytes());
  if (--unread_windows_ == 0) note_sources_free(accelerator_.events().record_or_wait(stream_));
}

void IntoHostJob::finish() noexcept {
  gathered_.clear();
  finish_enqueued();
}

}  // namespace tdcopier
