// The base class of all copy jobs: one copy in progress, in any direction, with its participants,
// its milestones and its keep-alives. The order with the caller's streams is made here: each job's
// constructor records the caller's work, hand_over_to() makes a consumer's stream wait for the
// copy, and order_after_reads() a producer's stream for the reads.
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
#include "engine/device/accelerator.h"
#include "engine/device/fallbacks.h"
#include "engine/device/graph_capture.h"
#include "engine/device/phases.h"
#include "engine/device/reclaim.h"
#include "engine/leaves/destination.h"
#include "engine/leaves/leaf.h"
#include "engine/leaves/result.h"

namespace tdcopier {

// The leaves that a job moves, and where they go: to the new memory of a result, or to existing
// destinations.
struct CopyWork {
  std::shared_ptr<const LeafTable> leaves;
  std::shared_ptr<const PackPlan> plan;
  std::shared_ptr<KeepAlive> sources;  // not null
  std::shared_ptr<Result> result = nullptr;
  // For a job without a result:
  DestinationTable destinations = {};                      // by leaf
  std::vector<std::byte*> to = {};                         // by chunk, on a device; see IntoPlan
  std::shared_ptr<KeepAlive> kept_destinations = nullptr;  // not null
};

struct TransferCounts {
  uint64_t transfers;
  uint64_t bytes;
  uint64_t fallbacks;
};

class CopyJob;

// A pool's reference to a job. It is empty once a thread has begun the job, so that a queued task
// keeps no memory alive.
class JobTicket {
 public:
  explicit JobTicket(std::shared_ptr<CopyJob> job) : job_(std::move(job)) {}
  std::shared_ptr<CopyJob> take() {  // null from the second call on
    const std::lock_guard lock(mutex_);
    return std::exchange(job_, nullptr);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<CopyJob> job_;  // guarded by mutex_
};

// The life of a job:
//
//   created     it has recorded what it waits for; its result gets memory before it begins
//   begun       by run(), or by the first worker that takes its ticket
//   shared      participants claim parts concurrently; a caller that would only wait takes part too
//   enqueued    the participant that leaves when no part is held or left records the events, and
//               releases what it can; others may still wait for memory, and find nothing to claim
//   done        the device has passed the last event
//
// A job may be dropped at any point: no memory is reused before its stream has passed its work.
//
// These members are touched by several threads. Participants hold a part; the last one finishes
// the job. Any thread with a reference may read.
//
//   member                      written by                       constant
//   participants_               who joins or leaves              never
//   next_part_                  participants, who claim          once it has passed parts()
//   failed_                     participants                     once true: no part is claimed
//   failure_                    participants, under mutex_       once enqueued_
//   transfers_, transfer_bytes_ participants                     once enqueued_
//   fallbacks_, phases_         participants, hand_over_to()     never
//   finished_                   the last                         once true
//   arrived_, last_write_       the last, before enqueued_       once enqueued_
//   last_read_                  as sources_free_, and before it  once sources_free_
//   sources_free_               the last, or the participant that has read the last source; under
//                               mutex_                           once true
//   enqueued_                   the last, under mutex_           once true
//   handed_over_                hand_over_to()                   once true
//   host_knows_arrival_         wait_done()                      once true
//
// A thread that finds a flag true may read, without a lock, what is constant since.
class CopyJob : public std::enable_shared_from_this<CopyJob> {
 public:
  virtual ~CopyJob();
  CopyJob(const CopyJob&) = delete;
  CopyJob& operator=(const CopyJob&) = delete;

  // Call exactly one of run() and run_in_background(), once. run() does the whole job on this
  // thread, and keeps a failure for rethrow_failure(). Blocks: while the staging limit is reached.
  // GIL: must not be held.
  void run() noexcept;
  // Runs the job on the pool's workers. Returns at once; false if the pool is closed and nothing
  // was done. Lifetime: the pool outlives the job.
  [[nodiscard]] bool run_in_background(ThreadPool& pool);

  // Takes part in the job until nothing is left to claim, for a thread that would otherwise only
  // wait until the job is enqueued. Blocks: as run(). Requires: no torch mode in this thread. GIL:
  // must not be held. Throws: Interrupted; a worker then takes this thread's place.
  void help();

  // Enqueues the transfers if they are deferred and all sources are staged. is_done() and the waits
  // do so too. Returns at once. GIL: may be held.
  virtual void send() noexcept {}

  // Milestone: every transfer is enqueued, or the job has failed.
  bool is_enqueued() const { return enqueued_.load(std::memory_order_acquire); }
  void wait_enqueued();  // Blocks. GIL: must not be held. Throws: Interrupted, as all waits here.

  // Milestone: the sources may be written again, or the job has failed. Host sources have been
  // read. Device sources may be written by work that is ordered after the reads, see
  // order_after_reads().
  bool are_sources_free() const;
  // Returns whether the sources are known to be free, without asking the device.
  bool are_sources_known_free() const;
  void wait_sources_free();  // Blocks. GIL: must not be held.
  // Makes `stream`, of the sources' device, wait for the reads. Requires: are_sources_free().
  void order_after_reads(const c10::Stream& stream) const;
  // Returns an event after the device's accesses to the caller's host memory: its reads of host
  // sources, or its writes to host destinations; null: it accesses none any more. Host threads may
  // access host memory later. Requires: is_enqueued().
  const EventRef& last_access() const {
    return source_device().is_cpu() ? last_read_ : last_write_;
  }

  // Milestone: the transfers have arrived, or the job has failed and no longer writes to the
  // caller's memory. A device error counts as the end.
  bool is_done();
  // Returns whether the job is known to be done, without asking the device.
  bool is_known_done() const;
  void wait_done();  // Blocks. GIL: must not be held. Throws the device's error.

  // Requires: is_enqueued().
  bool has_failed() const { return failure_ != nullptr; }
  // Throws std::out_of_range, on every call, if the device has found a row number to be out of
  // range. Call it when the host has waited for the device.
  virtual void check_numbers() const {}
  // Throws the failure of a job that has failed, on every call. Requires: is_enqueued().
  void rethrow_failure() const;

  // Makes `stream`, of the target, wait for the transfers, and ensures that no memory of the result
  // is reused while `stream` may still read it. Returns at once. Requires: is_enqueued(), no
  // failure.
  void hand_over_to(const c10::Stream& stream);

  // Releases the sources and destinations. Requires: the caller knows that the job is done.
  void release_kept() noexcept;
  // Drops the result's memory if the job is enqueued, and no worker is making outputs. A worker
  // that is about to leave the job would otherwise do so: late, and without the GIL, which storages
  // need that Python has seen. Requires: nothing uses the job any more, except its workers.
  void drop_result() noexcept;

  // Null if the job fills existing destinations.
  const std::shared_ptr<Result>& result() const { return work_.result; }
  // The phase times of all participants together.
  PhaseTimes& phases() { return phases_; }
  // The number of leaves whose rows the device itself reads or writes in pinned tables.
  virtual uint32_t rows_in_place() const { return 0; }
  // Whether a caller that waits for the result waits until its host sources are free, too.
  virtual bool waits_hold_for_reads() const { return true; }
  TransferCounts counts() const { return {transfers_, transfer_bytes_, fallbacks_}; }
  const PackPlan& plan() const { return plan_; }
  // The number of allocations on the target: of a result, or of chunks that are scattered.
  virtual size_t chunks() const;
  const c10::Device& source_device() const { return leaves_.device(); }
  const c10::Device& target() const { return target_; }

 protected:
  // The event after the last write, of a failed job too. Null: the device has none to make.
  const EventRef& last_write() const { return last_write_; }
  // Moves from `work` inside the constructor, so the other arguments may be computed from it.
  // `stream`, of the accelerator, gets the last transfer, or the wait for it. `read_stream` gets
  // the device's reads of the sources; null: no device reads them.
  CopyJob(Accelerator& accelerator, const c10::Stream& stream, const c10::Stream* read_stream,
          c10::Device target, CopyWork&& work);

  // The number of parts that participants claim. 0: a single participant does everything.
  virtual size_t parts() const { return 0; }
  // The number of participants from which on no other thread joins.
  virtual size_t most_participants() const { return parts(); }
  // Returns whether a caller may take part. transfer_all() must then wait, and so be interrupted,
  // only before it claims a part.
  virtual bool can_be_helped() const { return false; }
  // Claims parts and enqueues their transfers until none is left or the job has failed. May throw.
  virtual void transfer_all() = 0;
  // Enqueues the work that follows all transfers on the stream. Called once all parts are finished,
  // unless the job has failed. May throw.
  virtual void complete() {}
  // Called when no participant holds a part, and none is left to claim.
  virtual void finish() noexcept { finish_enqueued(); }

  // Marks the job as enqueued, or failed. Call once, after all transfers.
  void finish_enqueued() noexcept;
  // Marks the sources as free, which may be before the job is enqueued. `read` is an event after
  // the device's last read; null: no read is in flight.
  void note_sources_free(EventRef read) noexcept;

  // Runs a part of the job that uses the device. If it throws, the job fails.
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
  void fail() noexcept;  // keeps the current exception if it is the first
  bool is_failing() const { return failed_; }
  void count_transfer(uint64_t bytes);
  // Returns the index of the next part that no participant has claimed; it may be past the last.
  size_t claim() { return next_part_++; }
  // Returns the index that claim() would return.
  size_t next_part() const { return next_part_; }
  // Returns whether participants may find a part to claim.
  bool is_part_left() const { return !failed_ && next_part_ < parts(); }

  // Scope in which the calling participant holds no part, for example because it waits for memory
  // to put one in. The job does not wait for it: it may end meanwhile.
  class WithoutPart {
   public:
    explicit WithoutPart(CopyJob& job) : job_(job) { job_.leave(); }
    ~WithoutPart() { ++job_.participants_; }
    WithoutPart(const WithoutPart&) = delete;
    WithoutPart& operator=(const WithoutPart&) = delete;

   private:
    CopyJob& job_;
  };

  Accelerator& accelerator_;
  const c10::Stream stream_;
  const c10::Stream* const read_stream_;
  const c10::Device target_;
  const CopyWork work_;
  const LeafTable& leaves_;
  const PackPlan& plan_;
  PhaseTimes phases_;
  EventRef arrived_;  // after the last transfer; see the table above

 private:
  void begin_on_worker() noexcept;
  void invite_workers(size_t workers) noexcept;
  bool join();
  void work() noexcept;
  bool leave() noexcept;
  void replace_by_worker() noexcept;
  void work_on_worker() noexcept;
  void record_end() noexcept;
  void wait_until_set(const std::atomic<bool>& milestone);

  ThreadPool* pool_ = nullptr;         // that the job was submitted to
  std::shared_ptr<JobTicket> ticket_;  // null: not submitted to a pool
  // Threads that may hold a part. The thread that begins is counted already.
  std::atomic<uint32_t> participants_ = 1;
  std::atomic<bool> finished_ = false;  // finish() has been called, or is about to be
  std::atomic<size_t> next_part_ = 0;
  std::atomic<uint64_t> transfers_ = 0;
  std::atomic<uint64_t> transfer_bytes_ = 0;
  FallbackCount fallbacks_ = 0;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> handed_over_ = false;
  std::atomic<bool> host_knows_arrival_ = false;  // the host has waited: later work need not

  Mutex mutex_;
  Condition milestone_;
  std::atomic<bool> sources_free_ = false;  // once `last_read_` has ended too
  std::atomic<bool> enqueued_ = false;
  EventRef last_read_;   // after the device's last read of sources
  EventRef last_write_;  // after the last write, of a failed job too
  std::exception_ptr failure_;
};

}  // namespace tdcopier
