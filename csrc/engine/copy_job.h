// One copy at work, whatever its direction: who works on it, when it is done, what it hands over.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/interleaver.h"
#include "base/monitor.h"
#include "base/pack_plan.h"
#include "base/thread_pool.h"
#include "engine/accelerator.h"
#include "engine/chunk.h"
#include "engine/fallbacks.h"
#include "engine/graph_capture.h"
#include "engine/leaf.h"
#include "engine/stage.h"
#include "engine/steps.h"

namespace tdcopier {

// Whoever keeps the sources alive. The engine gives them back as soon as their bytes were read.
class SourceHold {
 public:
  virtual ~SourceHold() = default;
  // The second call does nothing. Thread: any. GIL: may or may not be held; must not wait for it.
  virtual void give_back() noexcept = 0;
};

struct TransferCounts {
  uint64_t transfers;
  uint64_t bytes;
  uint64_t fallbacks;  // gathers, scatters and transfers that were left to torch
};

class CopyJob;

// What a pool knows of a job that it was given: nothing any more once somebody else has begun it,
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

// Life: made, then exactly one of run() and run_in_background(); the rest at any time, from any
// thread. A job is dropped safely at any point: its memory belongs to the copy stream, which is in
// order, or is not reused before that stream has passed.
class CopyJob : public std::enable_shared_from_this<CopyJob> {
 public:
  virtual ~CopyJob() = default;
  CopyJob(const CopyJob&) = delete;
  CopyJob& operator=(const CopyJob&) = delete;

  // Enqueues everything on this thread. Never throws: a failure is kept for `rethrow_failure`.
  // Blocks: while the staging bound is reached. GIL: must not be held.
  void run() noexcept;

  // The same on the pool's workers. Returns at once; false if the pool is closed and nothing was
  // done. Lifetime: the pool outlives the job.
  [[nodiscard]] bool run_in_background(ThreadPool& pool);

  // For a thread that would only wait until the job is enqueued: begins it if nobody has yet, or is
  // one more hand, and comes back when nothing is left to begin; others may still be at work.
  // Requires: no torch mode in this thread. Blocks: as run(). GIL: must not be held.
  void help() noexcept;

  // Enqueued: the sources were read, or their device will do so in the order of its streams, and
  // every transfer is on the copy stream; or the job failed.
  bool is_enqueued() const { return enqueued_.load(std::memory_order_acquire); }
  virtual void wait_enqueued();  // Blocks. GIL: must not be held.

  // Where the transfers are left to whoever uses the copy: enqueues them, if that is all there is
  // to do. Asking is_done() and waiting do it too. Returns at once. GIL: may be held.
  virtual void send() noexcept {}

  // Done: the transfers have arrived; or the job failed, and writes no more to the caller's memory.
  // A device error counts as an end.
  virtual bool is_done();
  void wait_done();  // Blocks. GIL: must not be held. Throws the device's error.

  // Requires: is_enqueued().
  bool has_failed() const { return failure_ != nullptr; }
  // Throws what made the job fail, if it did; every time. Requires: is_enqueued().
  void rethrow_failure() const;

  // `stream`, of the target, waits for the transfers, and no chunk is reused while it can still
  // read it. Returns at once. Requires: is_enqueued(), no failure, a target that has streams.
  virtual void hand_over_to(const c10::Stream& stream);

  // The sources were read, or their device will do so in the order of its streams; or the job
  // failed. No later than enqueued, and earlier where bytes go on from where they arrive.
  virtual void wait_reads_enqueued() { wait_enqueued(); }  // Blocks. GIL: must not be held.
  virtual bool are_reads_enqueued() const { return is_enqueued(); }

  // `stream`, of the sources' device, waits until the sources were read. Host sources were when
  // the job is enqueued. Returns at once. Requires: are_reads_enqueued().
  virtual void order_behind_reads(const c10::Stream&) {}

  // Light tensors over the slots of leaves [first, last), to the same places of `to`. Requires:
  // is_enqueued() and no failure.
  void make_outputs(size_t first, size_t last, RecycledVector<at::Tensor>& to) const;
  // Those that workers have made meanwhile, by leaf: the first ones, or none. They make no more of
  // them; whoever asks a second time gets none. Requires: as make_outputs().
  RecycledVector<at::Tensor> take_made_outputs();
  // Makes of a tensor that was an output of this leaf in an earlier copy, with the same plan, the
  // one of this copy. Not if anybody has changed it, or if this is not the only reference to it.
  // `keys` are those that outputs get. Requires: as make_outputs().
  [[nodiscard]] bool reuse_output(const at::Tensor& earlier, size_t leaf,
                                  c10::DispatchKeySet keys) const;
  size_t leaves() const { return leaves_.size(); }

  // For the caller that knows the job to be done: sources need no longer wait for anybody else.
  virtual void give_back_sources() noexcept { sources_->give_back(); }

  // Of the threads that work on it, together.
  StepTimes& steps() { return steps_; }
  // Bytes that the thread which enqueues the job has to move, or wait for.
  virtual uint64_t host_bytes() const { return plan_.total_bytes; }
  TransferCounts counts() const { return {transfers_, transfer_bytes_, fallbacks_}; }
  const PackPlan& plan() const { return plan_; }
  // Allocations on the target.
  virtual size_t chunks() const { return plan_.chunks.size(); }
  const c10::Device& source_device() const { return leaves_.device(); }
  const c10::Device& target() const { return target_; }

 protected:
  // `stream`, of the accelerator, has the last transfer, or the wait for it.
  CopyJob(Accelerator& accelerator, const c10::Stream& stream, c10::Device target, LeafTable leaves,
          std::shared_ptr<const PackPlan> plan, std::shared_ptr<SourceHold> sources);

  // Once, on the first thread that works on the job. Device guards are set here.
  virtual void allocate_chunks() = 0;
  // Whether there is anything to hand over: memory that existed is its owner's.
  virtual bool has_outputs() const { return true; }
  // How many threads may be in transfer_all(), side by side or one after the other.
  virtual size_t most_hands() const { return 1; }
  // Enqueues transfers until there are none left or somebody has failed. May throw.
  virtual void transfer_all() = 0;
  // By the last one out, unless somebody has failed: what comes behind all transfers on the
  // accelerator's stream. May throw.
  virtual void finish_transfers() {}
  // By the last one out, even of a failed job: sees to it that the sources are given back.
  virtual void finish_reading() noexcept = 0;

  // By the last one out.
  virtual void finish_hands() noexcept { finish(); }
  // Once, behind all transfers: from here on the job is enqueued, or has failed.
  void finish() noexcept;
  // Does some work on the device, of this job. What it throws makes the job fail.
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

  bool somebody_failed() const { return failed_; }
  // For hands side by side: calls work(window) for windows that no other hand has claimed, until
  // there are none left or somebody has failed.
  template <typename Work>
  void claim_windows(const std::vector<Window>& windows, const Work& work) {
    while (!somebody_failed()) {
      interleave();
      const size_t window = next_window_++;
      if (window >= windows.size()) return;
      work(windows[window]);
    }
  }
  // The window's share of each leaf to `staging`.
  void stage(const Window& window, std::byte* staging);
  void count_transfer(uint64_t bytes);

  Accelerator& accelerator_;
  const c10::Stream stream_;
  const c10::Device target_;
  const LeafTable leaves_;
  const std::shared_ptr<const PackPlan> shared_plan_;
  const PackPlan& plan_;
  const std::shared_ptr<SourceHold> sources_;  // not null
  std::vector<Chunk> chunks_;                  // written before any worker shares the job
  StepTimes steps_;

 private:
  at::Tensor output(uint32_t leaf) const;
  // Whoever gets true has to lead(), and nobody else. Of a job that workers were given.
  bool begin();
  // Does the job with up to so many of the pool's workers, who wake while this thread allocates.
  // Returns as leave().
  bool lead(ThreadPool* pool, size_t workers) noexcept;
  void call_others(ThreadPool& pool, size_t hands);
  bool join();              // is there room for one more hand?
  bool be_hand() noexcept;  // of one that has joined, or was called. Returns as leave()
  void open() noexcept;     // there are chunks, or never will be
  void work() noexcept;
  bool leave() noexcept;  // the last one out finishes the job; was it this one?
  // By a worker who was the last one out, while the caller does other things.
  void make_outputs_ahead() noexcept;
  void allocate();  // allocate_chunks(), and remembers them

  const c10::DispatchKeySet output_keys_;
  const bool inference_mode_;   // the caller's when the job was made
  ThreadPool* pool_ = nullptr;  // whose workers the job was given to; written before they have it
  std::shared_ptr<JobTicket> ticket_;       // written before they have it; null: none were given it
  std::atomic<uint32_t> participants_ = 1;  // who leads is one, even before there is anybody
  std::atomic<size_t> next_window_ = 0;
  std::atomic<uint64_t> transfers_ = 0;
  std::atomic<uint64_t> transfer_bytes_ = 0;
  FallbackCount fallbacks_ = 0;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> handed_over_ = false;

  Mutex mutex_;
  Condition became_open_;
  bool open_ = false;  // guarded by mutex_
  Condition became_enqueued_;
  std::atomic<bool> enqueued_ = false;  // written under mutex_
  std::exception_ptr failure_;          // guarded by mutex_ until enqueued_, constant after

  std::mutex made_mutex_;
  RecycledVector<at::Tensor> made_;  // outputs, by leaf; guarded by made_mutex_, as the next
  bool made_are_taken_ = false;

 protected:
  EventRef arrived_;  // behind the last transfer; by a single hand, or by the last one out
  // Of a job that failed: behind what it has enqueued all the same and that writes to the caller's
  // memory; null if there is no such. By the last one out.
  EventRef stopped_;
};

}  // namespace tdcopier
