// The life of every copy job: the hands that work on it, the last of which records its event.
#include "engine/copy_job.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "engine/byte_tensor.h"
#include "engine/graph_capture.h"
#include "engine/output_tensor.h"
#include "engine/own_chunks.h"

namespace tdcopier {
namespace {

// A resizable storage of no bytes.
c10::Storage empty_storage(c10::Device device) {
  return {c10::Storage::use_byte_size_t(), size_t{0}, c10::DataPtr(nullptr, device),
          c10::GetAllocator(device.type()), /*resizable=*/true};
}

}  // namespace

CopyJob::CopyJob(Accelerator& accelerator, const c10::Stream& stream, c10::Device target,
                 LeafTable leaves, std::shared_ptr<const PackPlan> plan,
                 std::shared_ptr<SourceHold> sources)
    : accelerator_(accelerator),
      stream_(stream),
      target_(target),
      leaves_(std::move(leaves)),
      shared_plan_(std::move(plan)),
      plan_(*shared_plan_),
      sources_(std::move(sources)),
      output_keys_(plain_key_set(target)),
      inference_mode_(c10::InferenceMode::is_enabled()) {}

void CopyJob::run() noexcept {
  lead(nullptr, 0);
}

bool CopyJob::run_in_background(ThreadPool& pool) {
  pool_ = &pool;
  ticket_ = std::make_shared<JobTicket>(shared_from_this());
  const bool taken = pool.submit([ticket = ticket_, &pool] {
    interleave();
    const std::shared_ptr<CopyJob> job = ticket->take();
    if (job && job->lead(&pool, pool.workers() - 1)) job->make_outputs_ahead();
  });
  if (!taken) ticket_->take();
  return taken;
}

void CopyJob::help() noexcept {
  if (pool_ == nullptr || is_enqueued()) return;
  if (begin()) {
    lead(pool_, pool_->workers());
  } else if (join()) {
    be_hand();
  }
}

bool CopyJob::begin() {
  interleave();
  return ticket_->take() != nullptr;
}

bool CopyJob::lead(ThreadPool* pool, size_t workers) noexcept {
  try {
    const size_t others = std::min(workers, std::max<size_t>(most_hands(), 1) - 1);
    if (others != 0) call_others(*pool, others);
    allocate();
  } catch (...) {
    fail();
  }
  open();
  work();
  return leave();
}

// Who comes when there is nothing left to do is not waited for. Should the pool be closing, this
// thread does it all.
void CopyJob::call_others(ThreadPool& pool, size_t hands) {
  pool.submit_to_many(
      [called = weak_from_this()] {
        const std::shared_ptr<CopyJob> job = called.lock();
        if (job && job->join() && job->be_hand()) job->make_outputs_ahead();
      },
      hands);
}

bool CopyJob::join() {
  interleave();
  const size_t most = most_hands();
  uint32_t present = participants_;
  while (present != 0 && present < most) {
    if (participants_.compare_exchange_weak(present, present + 1)) return true;
  }
  return false;
}

bool CopyJob::be_hand() noexcept {
  {
    std::unique_lock lock(mutex_);
    became_open_.wait(lock, [this] { return open_; });
  }
  work();
  return leave();
}

void CopyJob::open() noexcept {
  {
    const std::lock_guard lock(mutex_);
    open_ = true;
  }
  became_open_.notify_all();
}

void CopyJob::allocate() {
  const StepRange plan(steps_, Step::kPlan);
  const CountFallbacks counted(fallbacks_);
  const RelaxedCapture relaxed(accelerator_.device().type());
  allocate_chunks();
  if (target_.is_cpu()) return;  // host memory is filled again leaf by leaf
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const ChunkPlan& chunk = plan_.chunks[i];
    if (chunk.last - chunk.first > 1) remember_chunk(chunks_[i], plan_, chunk, leaves_);
  }
}

void CopyJob::work() noexcept {
  if (!failed_) attempt([this] { transfer_all(); });
}

bool CopyJob::leave() noexcept {
  interleave();
  if (--participants_ != 0) return false;
  finish_hands();
  return true;
}

void CopyJob::finish() noexcept {
  if (!failed_ && transfers_ != 0 && !arrived_) {
    attempt([this] {
      finish_transfers();
      arrived_ = accelerator_.events().record(stream_);
    });
  }
  finish_reading();
  {
    const std::lock_guard lock(mutex_);
    if (failed_) arrived_ = nullptr;
    enqueued_.store(true, std::memory_order_release);
  }
  became_enqueued_.notify_all();
}

void CopyJob::fail() noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
  failed_ = true;
}

void CopyJob::stage(const Window& window, std::byte* staging) {
  const StepRange range(steps_, Step::kStage);
  stage_window(plan_, leaves_, window, staging);
}

void CopyJob::count_transfer(uint64_t bytes) {
  ++transfers_;
  transfer_bytes_ += bytes;
}

void CopyJob::wait_enqueued() {
  std::unique_lock lock(mutex_);
  became_enqueued_.wait(lock, [this] { return is_enqueued(); });
}

bool CopyJob::is_done() {
  if (!is_enqueued()) return false;
  if (failure_) return !stopped_ || has_ended(*stopped_);
  if (!arrived_) return true;
  const RelaxedCapture relaxed(accelerator_.device().type());
  try {
    return arrived_->query();
  } catch (...) {
    return true;  // the device failed: get() and wait() will say how
  }
}

void CopyJob::wait_done() {
  wait_enqueued();
  const RelaxedCapture relaxed(accelerator_.device().type());
  if (arrived_) arrived_->synchronize();
  if (stopped_) wait_until_ended(*stopped_);
}

void CopyJob::rethrow_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

void CopyJob::hand_over_to(const c10::Stream& stream) {
  if (!arrived_) return;  // nothing was transferred
  const RelaxedCapture relaxed(target_.type());
  if (!handed_over_.exchange(true)) accelerator_.run_ahead().note_hand_over(stream);
  arrived_->block(stream);
  const c10::impl::VirtualGuardImpl backend(target_.type());
  for (const Chunk& chunk : chunks_) {
    if (chunk.storage.nbytes() != 0)
      backend.recordDataPtrOnStream(chunk.storage.data_ptr(), stream);
  }
}

void CopyJob::make_outputs(size_t first, size_t last, RecycledVector<at::Tensor>& to) const {
  for (size_t i = first; i < last; ++i) to[i] = output(static_cast<uint32_t>(i));
}

// In small parts, so that a caller who comes takes what there is and goes on from there.
void CopyJob::make_outputs_ahead() noexcept {
  constexpr size_t kPart = 64;
  if (failed_ || !has_outputs()) return;
  const c10::InferenceMode mode(inference_mode_);
  for (size_t first = 0; first < leaves(); first += kPart) {
    interleave();
    const std::lock_guard lock(made_mutex_);
    if (made_are_taken_) return;
    try {
      const StepRange range(steps_, Step::kOutputs);
      made_.resize(leaves());
      make_outputs(first, std::min(first + kPart, leaves()), made_);
    } catch (...) {  // no memory: whoever takes the others makes these as well, or fails as we did
      made_are_taken_ = true;
      made_.clear();
      return;
    }
  }
}

RecycledVector<at::Tensor> CopyJob::take_made_outputs() {
  const std::lock_guard lock(made_mutex_);
  made_are_taken_ = true;
  return std::exchange(made_, {});
}

bool CopyJob::reuse_output(const at::Tensor& earlier, size_t leaf_index,
                           c10::DispatchKeySet keys) const {
  const Leaf& leaf = leaves_[leaf_index];
  if (leaf.bytes == 0) return false;  // it has a storage of its own, which may have grown
  OutputTensor* output = OutputTensor::of(earlier);
  if (output == nullptr || earlier.use_count() != 1 || earlier.weak_use_count() != 1) return false;
  if (!output->is_plain(keys)) return false;
  if (output->device() != target_ || output->dtype() != c10::scalarTypeToTypeMeta(leaf.dtype) ||
      output->sizes() != leaves_.sizes(leaf) || output->strides() != leaves_.strides(leaf)) {
    return false;
  }
  const Slot& slot = plan_.slots[leaf_index];
  const Chunk& chunk = chunks_[slot.chunk];
  output->move_to(chunk.storage, (chunk.shift_bytes + slot.offset) / output->itemsize());
  return true;
}

at::Tensor CopyJob::output(uint32_t leaf_index) const {
  const Leaf& leaf = leaves_[leaf_index];
  const Slot& slot = plan_.slots[leaf_index];
  const Chunk& chunk = chunks_[slot.chunk];
  const caffe2::TypeMeta dtype = c10::scalarTypeToTypeMeta(leaf.dtype);
  // An empty leaf shares nothing: `out=` and `resize_` often grow one, over its neighbours' bytes.
  c10::Storage storage = leaf.bytes != 0 ? chunk.storage : empty_storage(target_);
  const uint64_t begin = leaf.bytes != 0 ? chunk.shift_bytes + slot.offset : 0;
  at::Tensor output =
      at::detail::make_tensor<OutputTensor>(std::move(storage), output_keys_, dtype);
  output.unsafeGetTensorImpl()->set_sizes_and_strides(
      leaves_.sizes(leaf), leaves_.strides(leaf), static_cast<int64_t>(begin / dtype.itemsize()));
  return output;
}

}  // namespace tdcopier
