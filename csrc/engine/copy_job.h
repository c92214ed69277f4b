// One copy at work: allocates the chunks, stages and transfers them, and hands them over in order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "base/pack_plan.h"
#include "base/thread_pool.h"
#include "engine/leaf.h"
#include "engine/stage.h"
#include "engine/target_device.h"

namespace tdcopier {

// Whoever keeps the sources alive. The engine gives them back as soon as their bytes were read.
class SourceHold {
 public:
  virtual ~SourceHold() = default;
  // Thread: any. GIL: may or may not be held; must not wait for it.
  virtual void give_back() noexcept = 0;
};

struct TransferCounts {
  uint64_t transfers;
  uint64_t bytes;
};

// Life: made, then exactly one of run() and run_in_background(); the rest at any time, from any
// thread. A job is dropped safely at any point: its memory belongs to the copy stream, which is in
// order.
class CopyJob : public std::enable_shared_from_this<CopyJob> {
 public:
  CopyJob(TargetDevice& target, LeafTable leaves, PackPlan plan, bool use_pinned_staging,
          std::unique_ptr<SourceHold> sources);
  CopyJob(const CopyJob&) = delete;
  CopyJob& operator=(const CopyJob&) = delete;

  // Stages and enqueues everything on this thread. Never throws: a failure is kept for
  // `rethrow_failure`. Blocks: while the staging bound is reached. GIL: must not be held.
  void run() noexcept;

  // The same on the pool's workers. Returns at once; false if the pool is closed and nothing was
  // done.
  [[nodiscard]] bool run_in_background(ThreadPool& pool);

  // Enqueued: the sources were read and every transfer is on the copy stream, or the job failed.
  bool is_enqueued() const { return enqueued_.load(std::memory_order_acquire); }
  void wait_enqueued();  // Blocks. GIL: must not be held.

  // Done: the transfers have arrived, or the job failed. A device error counts as an end.
  bool is_done();
  void wait_done();  // Blocks. GIL: must not be held. Throws the device's error.

  // Requires: is_enqueued().
  bool has_failed() const { return failure_ != nullptr; }
  // Throws what made the job fail, if it did; every time. Requires: is_enqueued().
  void rethrow_failure() const;

  // `stream` waits for the transfers, and no chunk is reused while it can still read it. Returns at
  // once. Requires: is_enqueued() and no failure.
  void hand_over_to(const c10::Stream& stream);

  // A light tensor over the leaf's slot. Requires: is_enqueued() and no failure.
  at::Tensor output(uint32_t leaf) const;

  TransferCounts counts() const;
  const PackPlan& plan() const { return plan_; }

 private:
  struct Chunk {
    c10::Storage storage;
    uint64_t shift_bytes = 0;  // where its first slot begins
  };

  void allocate_chunks();
  void work() noexcept;  // transfers windows until there are none left or one has failed
  void transfer(const Window& window);
  void leave() noexcept;  // the last one out finishes the job
  void fail() noexcept;   // keeps the current exception, the first one only

  TargetDevice& target_;
  const LeafTable leaves_;
  const PackPlan plan_;
  const bool use_pinned_staging_;
  const c10::DispatchKeySet output_keys_;
  const std::vector<Window> windows_;
  std::unique_ptr<SourceHold> sources_;

  std::vector<Chunk> chunks_;  // written before any worker shares the job
  std::atomic<size_t> next_window_ = 0;
  std::atomic<uint32_t> participants_ = 1;
  std::atomic<uint64_t> transfers_ = 0;
  std::atomic<uint64_t> transfer_bytes_ = 0;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> handed_over_ = false;

  std::mutex mutex_;
  std::condition_variable became_enqueued_;
  std::atomic<bool> enqueued_ = false;  // written under mutex_
  std::exception_ptr failure_;          // guarded by mutex_ until enqueued_, constant after
  EventRef arrived_;                    // behind the last transfer; constant once enqueued_
};

}  // namespace tdcopier
