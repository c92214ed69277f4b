// The copy job: workers claim windows one by one, and the last to leave records the job's event.
#include "engine/copy_job.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "engine/byte_tensor.h"
#include "engine/graph_capture.h"
#include "engine/transport.h"

namespace tdcopier {

CopyJob::CopyJob(TargetDevice& target, LeafTable leaves, PackPlan plan, bool use_pinned_staging,
                 std::unique_ptr<SourceHold> sources)
    : target_(target),
      leaves_(std::move(leaves)),
      plan_(std::move(plan)),
      use_pinned_staging_(use_pinned_staging),
      output_keys_(plain_key_set(target.device())),
      windows_(cut_windows(plan_, use_pinned_staging ? kStagingBufferBytes : UINT64_MAX / 2)),
      sources_(std::move(sources)) {}

void CopyJob::run() noexcept {
  try {
    allocate_chunks();
  } catch (...) {
    fail();
  }
  work();
  leave();
}

bool CopyJob::run_in_background(ThreadPool& pool) {
  return pool.submit([job = shared_from_this(), &pool] {
    try {
      job->allocate_chunks();
      const size_t hands = std::min(pool.workers(), job->windows_.size());  // this one included
      for (size_t i = 1; i < hands; ++i) {
        ++job->participants_;
        bool taken = false;
        try {
          taken = pool.submit([job] {
            job->work();
            job->leave();
          });
        } catch (...) {
          --job->participants_;
          throw;
        }
        if (!taken) --job->participants_;  // the pool is closing: this thread does it all
      }
    } catch (...) {
      job->fail();
    }
    job->work();
    job->leave();
  });
}

void CopyJob::allocate_chunks() {
  const RelaxedCapture relaxed(target_.device().type());
  const c10::StreamGuard on_copy_stream(target_.copy_stream());
  chunks_.resize(plan_.chunks.size());
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const ChunkPlan& chunk = plan_.chunks[i];
    chunks_[i].storage =
        target_.allocate(chunk.bytes, chunk.alignment_bytes, &chunks_[i].shift_bytes);
  }
}

void CopyJob::work() noexcept {
  try {
    const RelaxedCapture relaxed(target_.device().type());
    const c10::StreamGuard on_copy_stream(target_.copy_stream());
    while (!failed_) {
      const size_t window = next_window_++;
      if (window >= windows_.size()) break;
      transfer(windows_[window]);
    }
  } catch (...) {
    fail();
  }
}

void CopyJob::transfer(const Window& window) {
  const Chunk& chunk = chunks_[window.chunk];
  const uint64_t bytes = window.end - window.begin;
  const uint64_t offset = chunk.shift_bytes + window.begin;
  if (use_pinned_staging_) {
    StagingLease lease = target_.staging().acquire();
    stage_window(plan_, leaves_, window, static_cast<std::byte*>(lease.bytes().mutable_data_ptr()));
    enqueue_from_pinned(target_.copy_stream(), chunk.storage, offset, lease.bytes(), bytes);
    EventRef read = target_.events().record(target_.copy_stream());
    if (windows_.size() == 1) arrived_ = read;  // the only participant: no second event is needed
    lease.in_flight_until(std::move(read));
  } else if (plan_.chunks[window.chunk].packed) {
    const auto gathered = std::make_unique_for_overwrite<std::byte[]>(bytes);
    stage_window(plan_, leaves_, window, gathered.get());
    copy_from_pageable(chunk.storage, offset, gathered.get(), bytes);
  } else {
    const uint32_t leaf = plan_.order[plan_.chunks[window.chunk].first];
    copy_from_pageable(chunk.storage, offset, leaves_[leaf].data, bytes);
  }
  ++transfers_;
  transfer_bytes_ += bytes;
}

void CopyJob::leave() noexcept {
  if (--participants_ != 0) return;
  EventRef arrived = arrived_;
  try {
    if (!failed_ && !windows_.empty() && !arrived) {
      const RelaxedCapture relaxed(target_.device().type());
      arrived = target_.events().record(target_.copy_stream());
    }
  } catch (...) {
    fail();
  }
  if (sources_) sources_->give_back();
  {
    const std::lock_guard lock(mutex_);
    arrived_ = failed_ ? nullptr : std::move(arrived);
    enqueued_.store(true, std::memory_order_release);
  }
  became_enqueued_.notify_all();
}

void CopyJob::fail() noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
  failed_ = true;
}

void CopyJob::wait_enqueued() {
  std::unique_lock lock(mutex_);
  became_enqueued_.wait(lock, [this] { return is_enqueued(); });
}

bool CopyJob::is_done() {
  if (!is_enqueued()) return false;
  if (failure_ || !arrived_) return true;
  const RelaxedCapture relaxed(target_.device().type());
  try {
    return arrived_->query();
  } catch (...) {
    return true;  // the device failed: get() and wait() will say how
  }
}

void CopyJob::wait_done() {
  wait_enqueued();
  const RelaxedCapture relaxed(target_.device().type());
  if (arrived_) arrived_->synchronize();
}

void CopyJob::rethrow_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

void CopyJob::hand_over_to(const c10::Stream& stream) {
  if (!arrived_) return;  // nothing was transferred
  const RelaxedCapture relaxed(target_.device().type());
  if (!handed_over_.exchange(true)) target_.run_ahead().note_hand_over(stream);
  arrived_->block(stream);
  const c10::impl::VirtualGuardImpl backend(target_.device().type());
  for (const Chunk& chunk : chunks_) {
    if (chunk.storage.nbytes() != 0)
      backend.recordDataPtrOnStream(chunk.storage.data_ptr(), stream);
  }
}

at::Tensor CopyJob::output(uint32_t leaf_index) const {
  const Leaf& leaf = leaves_[leaf_index];
  const Slot& slot = plan_.slots[leaf_index];
  const Chunk& chunk = chunks_[slot.chunk];
  const caffe2::TypeMeta dtype = c10::scalarTypeToTypeMeta(leaf.dtype);
  // An empty leaf shares nothing: `out=` and `resize_` often grow one, over its neighbours' bytes.
  c10::Storage storage = leaf.bytes != 0 ? chunk.storage : target_.empty_storage();
  const uint64_t begin = leaf.bytes != 0 ? chunk.shift_bytes + slot.offset : 0;
  at::Tensor output =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), output_keys_, dtype);
  output.unsafeGetTensorImpl()->set_sizes_and_strides(
      leaves_.sizes(leaf), leaves_.strides(leaf), static_cast<int64_t>(begin / dtype.itemsize()));
  return output;
}

TransferCounts CopyJob::counts() const {
  return {transfers_, transfer_bytes_};
}

}  // namespace tdcopier
