// The life of every copy job, in order: begun, shared, enqueued, done.
#include "engine/jobs/copy_job.h"

#include <algorithm>
#include <utility>

#include "base/interleaver.h"
#include "base/polling_wait.h"
#include "engine/device/events.h"

namespace tdcopier {

CopyJob::CopyJob(Accelerator& accelerator, const c10::Stream& stream,
                 const c10::Stream* read_stream, c10::Device target, CopyWork&& work)
    : accelerator_(accelerator),
      stream_(stream),
      read_stream_(read_stream),
      target_(target),
      work_(std::move(work)),
      leaves_(*work_.leaves),
      plan_(*work_.plan) {}

size_t CopyJob::chunks() const {
  if (work_.result) return work_.result->chunks();
  return static_cast<size_t>(std::ranges::count_if(plan_.chunks, &ChunkPlan::scattered));
}

// ---- begun and shared ---------------------------------------------------------------------------

void CopyJob::run() noexcept {
  work();
  leave();
}

bool CopyJob::run_in_background(ThreadPool& pool) {
  pool_ = &pool;
  ticket_ = std::make_shared<JobTicket>(shared_from_this());
  bool taken = false;
  try {
    taken = pool.submit([ticket = ticket_] {
      interleave();
      if (const std::shared_ptr<CopyJob> job = ticket->take()) job->begin_on_worker();
    });
  } catch (...) {  // out of memory for the task
  }
  if (!taken) ticket_->take();
  return taken;
}

void CopyJob::begin_on_worker() noexcept {
  invite_workers(pool_->workers() - 1);
  work_on_worker();
}

// Asks other workers to join. The job does not wait for a worker that arrives when nothing is left
// to claim. If the pool is closing, the present participants do all the work.
void CopyJob::invite_workers(size_t workers) noexcept {
  const size_t others = std::min(workers, std::max<size_t>(most_participants(), 1) - 1);
  if (others == 0) return;
  try {
    pool_->submit_to_many(
        [called = weak_from_this()] {
          const std::shared_ptr<CopyJob> job = called.lock();
          if (job && job->join()) job->work_on_worker();
        },
        others);
  } catch (...) {  // out of memory for the tasks
  }
}

bool CopyJob::join() {
  interleave();
  const size_t most = most_participants();
  uint32_t present = participants_;
  while (is_part_left() && present < most) {
    if (participants_.compare_exchange_weak(present, present + 1)) return true;
  }
  return false;
}

void CopyJob::help() {
  if (pool_ == nullptr || is_enqueued() || !can_be_helped()) return;
  interleave();
  if (ticket_->take() != nullptr) {
    invite_workers(pool_->workers());
  } else if (!join()) {
    return;
  }
  bool interrupted = false;
  if (!failed_) {
    attempt([&] {
      try {
        transfer_all();
      } catch (const Interrupted&) {
        interrupted = true;
      }
    });
  }
  if (!interrupted) {
    leave();
    return;
  }
  replace_by_worker();
  throw Interrupted();
}

// Gives this participant's place to a worker, or finishes the work here if no worker can take it.
void CopyJob::replace_by_worker() noexcept {
  try {
    if (pool_->submit([job = shared_from_this()] { job->work_on_worker(); })) return;
  } catch (...) {
  }
  const InterruptibleWaits to_the_end(nullptr);
  work_on_worker();
}

void CopyJob::work() noexcept {
  if (!failed_) attempt([this] { transfer_all(); });
}

// Finishes the job if no participant holds a part, and none is left. Returns whether it did.
// Participants are counted before they look for a part. So if nothing is left, and the count is 0
// after that, no thread holds a part. One that is counted later finds nothing to claim.
bool CopyJob::leave() noexcept {
  interleave();
  if (--participants_ != 0) return false;
  interleave();
  if (is_part_left() || participants_ != 0 || finished_.exchange(true)) return false;
  finish();
  return true;
}

// Runs on a worker. The one that finishes the job also makes outputs, while the caller does other
// things.
void CopyJob::work_on_worker() noexcept {
  work();
  if (leave() && !failed_ && work_.result) work_.result->make_outputs_ahead(phases_);
  interleave();  // what it holds may be dropped late
}

void CopyJob::fail() noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
  failed_ = true;
}

void CopyJob::count_transfer(uint64_t bytes) {
  ++transfers_;
  transfer_bytes_ += bytes;
}

// ---- enqueued -----------------------------------------------------------------------------------

void CopyJob::finish_enqueued() noexcept {
  if (!failed_ && transfers_ != 0) attempt([this] { complete(); });
  record_end();
  if (!sources_free_) {
    EventRef read;
    if (read_stream_ != nullptr && *read_stream_ == stream_ && last_write_) {
      read = last_write_;
    } else if (read_stream_ != nullptr) {
      EventPool& events = Accelerator::of(read_stream_->device()).events();
      attempt([&] { read = events.record_or_wait(*read_stream_); });
    }
    note_sources_free(std::move(read));
  }
  {
    const std::lock_guard lock(mutex_);
    enqueued_.store(true, std::memory_order_release);
  }
  milestone_.notify_all();
}

// Records the end of a failed job too: the device may still write, or read.
void CopyJob::record_end() noexcept {
  if (transfers_ == 0 && !failed_ && !arrived_) return;
  const bool is_on_device = !stream_.device().is_cpu();
  if (!arrived_ && is_on_device) {
    attempt([this] { arrived_ = accelerator_.events().record_or_wait(stream_); });
  }
  last_write_ = failed_ ? std::exchange(arrived_, nullptr) : arrived_;
}

void CopyJob::note_sources_free(EventRef read) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (sources_free_) return;
    last_read_ = std::move(read);
    // First, so that who sees that the sources are free can also drop them.
    if (!last_read_) work_.sources->release();
    sources_free_.store(true, std::memory_order_release);
  }
  milestone_.notify_all();
  if (last_read_) Reclaimer::get().release_after(last_read_, work_.sources);
}

// Spins first: the last parts take a fraction of a millisecond, and a busy host may wake this
// thread some milliseconds late.
void CopyJob::wait_until_set(const std::atomic<bool>& milestone) {
  const auto is_set = [&milestone] { return milestone.load(std::memory_order_acquire); };
  if (PollingWait::spin_until(is_set)) return;
  std::unique_lock lock(mutex_);
  milestone_.wait(lock, is_set);
}

void CopyJob::wait_enqueued() {
  wait_until_set(sources_free_);
  send();
  wait_until_set(enqueued_);
}

bool CopyJob::are_sources_free() const {
  if (!sources_free_.load(std::memory_order_acquire)) return false;
  return !last_read_ || !source_device().is_cpu() || has_ended(*last_read_);
}

bool CopyJob::are_sources_known_free() const {
  if (!sources_free_.load(std::memory_order_acquire)) return false;
  return !last_read_ || !source_device().is_cpu() || is_known_done();
}

void CopyJob::wait_sources_free() {
  wait_until_set(sources_free_);
  if (last_read_ && source_device().is_cpu()) wait_until_ended(*last_read_);
}

void CopyJob::order_after_reads(const c10::Stream& stream) const {
  if (last_read_) block_until_ended(*last_read_, stream);
}

// ---- done ---------------------------------------------------------------------------------------

bool CopyJob::is_done() {
  send();
  if (!is_enqueued()) return false;
  const bool still_writes = work_.result ? !failure_ && arrived_ : last_write_ != nullptr;
  return !still_writes || has_ended(*last_write_);
}

bool CopyJob::is_known_done() const {
  if (!is_enqueued()) return false;
  return host_knows_arrival_ || (!arrived_ && !last_write_);
}

void CopyJob::wait_done() {
  wait_enqueued();
  if (arrived_) {
    wait_for(*arrived_);
    host_knows_arrival_ = true;
    return check_numbers();
  }
  if (!work_.result && last_write_) wait_until_ended(*last_write_);
  if (!failure_) check_numbers();  // the host waited when no event could be recorded
}

void CopyJob::rethrow_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

void CopyJob::hand_over_to(const c10::Stream& stream) {
  if (!arrived_ && !work_.result) return;
  const RelaxedCapture relaxed(target_.type());
  if (work_.result && transfers_ != 0 && !handed_over_.exchange(true)) {
    const CountFallbacks counted(fallbacks_);
    accelerator_.run_ahead().note_hand_over(stream);
  }
  if (arrived_ && !host_knows_arrival_) arrived_->block(stream);
  if (work_.result) work_.result->record_on(stream);
}

void CopyJob::release_kept() noexcept {
  work_.sources->release();
  if (work_.kept_destinations) work_.kept_destinations->release();
}

void CopyJob::drop_result() noexcept {
  if (is_enqueued() && work_.result) work_.result->drop_memory();
}

// A job that is destroyed before its writes are done passes its destinations to the reclaimer.
CopyJob::~CopyJob() {
  if (work_.result || !last_write_ || has_ended(*last_write_)) return;
  Reclaimer::get().release_after(std::move(last_write_), work_.kept_destinations);
}

}  // namespace tdcopier
