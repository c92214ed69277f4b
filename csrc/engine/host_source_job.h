// H2D: from the host to an accelerator, through pinned staging buffers; large leaves, and runs
// of small ones, that are pinned already without.
#pragma once

#include <memory>
#include <vector>

#include "base/combiner.h"
#include "base/thread_pool.h"
#include "engine/copy_job.h"
#include "engine/staged_window.h"

namespace tdcopier {

// Whether the device can read all of this chunk where it lies on the host.
bool goes_straight(const ChunkPlan& chunk, const PackPlan& plan, const LeafTable& leaves);

// Sources are given back when they have been staged; where the device reads some of them by itself,
// all are when it has done so, by `reclaimer`'s thread.
class HostSourceJob final : public CopyJob {
 public:
  // A window fits in a staging buffer.
  HostSourceJob(Accelerator& target, LeafTable leaves, std::shared_ptr<const PackPlan> plan,
                bool use_pinned_staging, WindowBytes window_bytes,
                std::shared_ptr<SourceHold> sources, ThreadPool& reclaimer);

  uint64_t host_bytes() const override { return host_bytes_; }
  void wait_reads_enqueued() override;
  bool are_reads_enqueued() const override;

 private:
  void allocate_chunks() override;
  size_t most_hands() const override { return windows_.size(); }
  void transfer_all() override;
  void finish_reading() noexcept override;
  void transfer(const Window& window);
  void transfer_staged(const Window& window);
  void enqueue(StagedWindow staged);
  void transfer_pageable(const Window& window);
  bool is_straight(const ChunkPlan& chunk) const;
  std::vector<Window> make_windows(WindowBytes window_bytes) const;

  const bool use_pinned_staging_;
  const std::vector<Window> windows_;  // claimed one by one
  const uint64_t host_bytes_;
  ThreadPool& reclaimer_;
  Combiner<StagedWindow> staged_;  // the driver takes one thread at a time
  EventRef read_;  // behind the device's reads of sources, if it has any; constant once enqueued
};

}  // namespace tdcopier
