// The chunks lie one behind the other in pinned memory, each as it will lie on the device.
#include "engine/held_source_job.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>
#include <utility>

#include "base/fork.h"
#include "engine/transport.h"

namespace tdcopier {

HeldSourceJob::HeldSourceJob(Accelerator& target, LeafTable leaves,
                             std::shared_ptr<const PackPlan> plan, WindowBytes window_bytes,
                             std::shared_ptr<SourceHold> sources, HeldLease lease)
    : CopyJob(target, target.to_device_stream(), target.device(), std::move(leaves),
              std::move(plan), std::move(sources)),
      generation_(fork_generation()),
      windows_(cut_windows(plan_, leaves_, window_bytes)),
      lease_(std::move(lease)) {
  uint64_t begin = 0;
  begins_.reserve(plan_.chunks.size());
  for (const ChunkPlan& chunk : plan_.chunks) {
    begins_.push_back(begin);
    begin += chunk.bytes;
  }
}

void HeldSourceJob::allocate_chunks() {
  lease_.allocate();
  const c10::StreamGuard on_copy_stream(stream_);
  c10::Allocator* allocator = c10::GetAllocator(target_.type());
  chunks_.reserve(plan_.chunks.size());
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(allocate_chunk(allocator, target_, chunk));
  }
}

void HeldSourceJob::transfer_all() {
  claim_windows(windows_, [this](const Window& window) {
    stage(window, lease_.data() + begins_[window.chunk] + window.begin);
  });
}

void HeldSourceJob::finish_hands() noexcept {
  if (somebody_failed()) {
    finish();
  } else {
    finish_reading();
  }
  {
    const std::lock_guard lock(staged_mutex_);
    staged_.store(true, std::memory_order_release);
  }
  became_staged_.notify_all();
}

void HeldSourceJob::send() noexcept {
  if (is_enqueued() || !are_reads_enqueued() || generation_ != fork_generation()) return;
  // A worker's state: a mode of this thread is not the copy's business, and may want the GIL.
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
  const std::lock_guard lock(sending_);
  if (is_enqueued()) return;
  attempt([this] { enqueue_all(); });
  attempt([this] { hold_until_read(); });
  finish();
}

void HeldSourceJob::enqueue_all() {
  const StepRange range(steps_, Step::kEnqueue);
  const c10::StreamGuard on_copy_stream(stream_);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const uint64_t bytes = plan_.chunks[i].bytes;
    if (bytes == 0) continue;
    enqueue_from_pinned(stream_, chunks_[i], lease_.data() + begins_[i], bytes);
    count_transfer(bytes);
  }
}

// Also where a transfer failed: the device may be reading for those before it.
void HeldSourceJob::hold_until_read() {
  EventRef read;
  try {
    read = accelerator_.events().record(stream_);
  } catch (...) {
    stream_.synchronize();  // which fails too where the device reads no more
    throw;
  }
  if (!somebody_failed()) arrived_ = read;
  lease_.in_flight_until(std::move(read));
}

void HeldSourceJob::wait_staged() {
  std::unique_lock lock(staged_mutex_);
  became_staged_.wait(lock, [this] { return are_reads_enqueued(); });
}

void HeldSourceJob::wait_enqueued() {
  wait_staged();
  send();
}

bool HeldSourceJob::is_done() {
  send();
  return CopyJob::is_done();
}

}  // namespace tdcopier
