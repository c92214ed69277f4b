// One copy at work, whatever its direction: its participants, its milestones, and what it keeps
// alive.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/monitor.h"
#include "base/pack_plan.h"
#include "base/thread_pool.h"
#include "engine/accelerator.h"
#include "engine/destination.h"
#include "engine/fallbacks.h"
#include "engine/graph_capture.h"
#include "engine/leaf.h"
#include "engine/phases.h"
#include "engine/reclaim.h"
#include "engine/result.h"

namespace tdcopier {

// What a job moves, and where to: to the new memory of a result, or to destinations that exist.
struct CopyWork {
  std::shared_ptr<const LeafTable> leaves;
  std::shared_ptr<const PackPlan> plan;
  std::shared_ptr<KeepAlive> sources;  // not null
  std::shared_ptr<Result> result = nullptr;
  // Without a result.
  DestinationTable destinations = {};                      // by leaf
  std::vector<std::byte*> to = {};                         // by chunk, on a device; see FillPlan
  std::shared_ptr<KeepAlive> kept_destinations = nullptr;  // not null
};

struct TransferCounts {
  uint64_t transfers;
  uint64_t bytes;
  uint64_t fallbacks;
};

class CopyJob;

// What a pool knows of a job that it was given: nothing any more once another thread has begun it,
// so that a task that waits in line keeps no memory.
class JobTicket {
 public:
  explicit JobTicket(std::shared_ptr<CopyJob> job) : job_(std::move(job)) {}
  std::shared_ptr<CopyJob> take() {  // null from the second time on
    const std::lock_guard lock(mutex_);
    return std::exchange(job_, nullptr);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<CopyJob> job_;  // guarded by mutex_
};

// The life of a job:
//
//   made        it has noted what it has to wait for; its memory comes now, or while others stage
//   begun       by run(), or by the first worker that takes its ticket
//   shared      participants claim parts side by side; a caller that would only wait is one too
//   enqueued    the last participant to leave records the events, and releases what can go
//   done        the device has passed the last event
//
// A job may be dropped at any point: its memory is not reused before its stream has passed.
class CopyJob : public std::enable_shared_from_this<CopyJob> {
 public:
  virtual ~CopyJob();
  CopyJob(const CopyJob&) = delete;
  CopyJob& operator=(const CopyJob&) = delete;

  // Exactly one of these two, once. The first does all on this thread; a failure is kept for
  // `rethrow_failure`. Blocks: while the staging bound is reached. GIL: must not be held.
  void run() noexcept;
  // On the pool's workers. Returns at once; false if the pool is closed and nothing was done.
  // Lifetime: the pool outlives the job.
  [[nodiscard]] bool run_in_background(ThreadPool& pool);

  // For a thread that would only wait until the job is enqueued: takes part until nothing is left
  // to claim. Blocks: as run(). Requires: no torch mode in this thread. GIL: must not be held.
  // Throws: Interrupted; a worker takes its place then.
  void help();

  // Where the transfers are deferred: enqueues them, if that is all that is left. is_done() and the
  // waits do it too. Returns at once. GIL: may be held.
  virtual void send() noexcept {}

  // Milestone: every transfer is on a stream; or the job failed.
  bool is_enqueued() const { return enqueued_.load(std::memory_order_acquire); }
  void wait_enqueued();  // Blocks. GIL: must not be held. Throws: Interrupted, as all waits here.

  // Milestone: the sources may be written again. Those on the host were read; those on a device by
  // work that is ordered after the reads, see order_after_reads(). Or the job failed.
  bool are_sources_free() const;
  void wait_sources_free();  // Blocks. GIL: must not be held.
  // `stream`, of the sources' device, waits until they were read. Requires: are_sources_free().
  void order_after_reads(const c10::Stream& stream) const;

  // Milestone: the transfers have arrived; or the job failed, and writes no more to the caller's
  // memory. A device error counts as an end.
  bool is_done();
  void wait_done();  // Blocks. GIL: must not be held. Throws the device's error.

  // Requires: is_enqueued().
  bool has_failed() const { return failure_ != nullptr; }
  // Throws what made the job fail, if it did; every time. Requires: is_enqueued().
  void rethrow_failure() const;

  // `stream`, of the target, waits for the transfers, and no memory of the result is reused while
  // it can still read it. Returns at once. Requires: is_enqueued(), no failure.
  void hand_over_to(const c10::Stream& stream);

  // For the caller that knows the job to be done.
  void release_kept() noexcept;

  // Null: it fills destinations.
  const std::shared_ptr<Result>& result() const { return work_.result; }
  // Of the threads that work on it, together.
  PhaseTimes& phases() { return phases_; }
  // Bytes that the thread which enqueues the job has to move, or wait for.
  virtual uint64_t host_bytes() const { return plan_.total_bytes; }
  TransferCounts counts() const { return {transfers_, transfer_bytes_, fallbacks_}; }
  const PackPlan& plan() const { return plan_; }
  // Allocations on the target.
  virtual size_t chunks() const { return work_.result ? work_.result->chunks() : 0; }
  const c10::Device& source_device() const { return leaves_.device(); }
  const c10::Device& target() const { return target_; }

 protected:
  // `work` is moved from in here, so the other arguments may be made from it.
  // `stream`, of the accelerator, has the last transfer, or the wait for it. `reads` has the
  // device's reads of sources; null: no device reads them.
  CopyJob(Accelerator& accelerator, const c10::Stream& stream, const c10::Stream* reads,
          c10::Device target, CopyWork&& work);

  // How many threads may be in transfer_all(), side by side or one after the other.
  virtual size_t most_participants() const { return 1; }
  // May a caller take part? That is where transfer_all() waits, which may be interrupted, only
  // before it claims a part.
  virtual bool can_be_helped() const { return false; }
  // Claims parts and enqueues their transfers until none is left or the job has failed. May throw.
  virtual void transfer_all() = 0;
  // By the last participant, unless the job has failed: what comes after all transfers on the
  // stream. May throw.
  virtual void complete() {}
  // By the last participant.
  virtual void finish() noexcept { finish_enqueued(); }

  // Once, after all transfers: from here on the job is enqueued, or has failed.
  void finish_enqueued() noexcept;
  // The sources are free from here on, earlier than at the end. `read`: after the last read.
  void note_sources_free(EventRef read) noexcept;

  // Does some of the job's work on the device. What it throws makes the job fail.
  template <typename Work>
  void attempt(const Work& work) noexcept {
    try {
      const CountFallbacks counted(fallbacks_);
      const RelaxedCapture relaxed(accelerator_.device().type());
      work();
    } catch (...) {
      fail();
    }
  }
  void fail() noexcept;  // keeps the current exception, the first one only
  bool is_failing() const { return failed_; }
  void count_transfer(uint64_t bytes);
  // For participants side by side: the next of `parts` parts that no other has claimed.
  size_t claim() { return next_part_++; }
  size_t next_part() const { return next_part_; }

  Accelerator& accelerator_;
  const c10::Stream stream_;
  const c10::Stream* const reads_;
  const c10::Device target_;
  const CopyWork work_;
  const LeafTable& leaves_;
  const PackPlan& plan_;
  PhaseTimes phases_;
  // After the last transfer; by the only participant, or by the last. Constant once enqueued.
  EventRef arrived_;

 private:
  void lead() noexcept;
  void call_others(size_t workers) noexcept;
  bool join();
  void work() noexcept;
  void leave() noexcept;
  void pass_on() noexcept;
  void work_to_the_end() noexcept;
  void record_end() noexcept;

  ThreadPool* pool_ = nullptr;              // whose workers the job was given to
  std::shared_ptr<JobTicket> ticket_;       // null: no pool has it
  std::atomic<uint32_t> participants_ = 1;  // the place of the thread that begins counts already
  std::atomic<size_t> next_part_ = 0;
  std::atomic<uint64_t> transfers_ = 0;
  std::atomic<uint64_t> transfer_bytes_ = 0;
  FallbackCount fallbacks_ = 0;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> handed_over_ = false;
  std::atomic<bool> host_knows_arrival_ = false;  // what it enqueues from then on comes after it

  Mutex mutex_;
  Condition milestone_;
  std::atomic<bool> sources_free_ = false;  // but for `read_`; written under mutex_
  std::atomic<bool> enqueued_ = false;      // written under mutex_
  EventRef read_;     // after the device's last read of sources; constant once sources_free_
  EventRef written_;  // after the last write to destinations, of a failed job too; see enqueued_
  std::exception_ptr failure_;  // guarded by mutex_ until enqueued_, constant after
};

}  // namespace tdcopier
