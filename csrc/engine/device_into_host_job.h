// D2H into memory that exists: large pinned destinations are written by the device, others by hands
// that wait for what arrives in staging buffers.
#pragma once

#include <atomic>
#include <vector>

#include "engine/into_job.h"
#include "engine/stage.h"

namespace tdcopier {

// The job is enqueued when the last byte that a hand writes is written. Its hands wait for the
// device, so they belong to a pool of their own, where nobody's staging waits behind them.
class DeviceIntoHostJob final : public IntoJob {
 public:
  // Thread: the caller's, whose current stream of the sources' device counts.
  DeviceIntoHostJob(Accelerator& source, LeafPairs pairs, PackPlan plan, bool use_pinned_staging,
                    IntoHolds holds, ThreadPool& reclaimer);

  size_t chunks() const override { return 0; }
  void wait_reads_enqueued() override;
  bool are_reads_enqueued() const override {
    return reads_enqueued_.load(std::memory_order_acquire);
  }
  void order_behind_reads(const c10::Stream& stream) override;

 private:
  void allocate_chunks() override;
  size_t most_hands() const override { return windows_.size(); }
  void transfer_all() override;
  void finish_reading() noexcept override;
  void transfer(const Window& window);
  void transfer_straight(const Window& window);
  void transfer_staged(const Window& window);
  void transfer_pageable(const Window& window);
  // Where the window's bytes are on the device: gathered into `here`, if need be.
  const std::byte* image_of(const Window& window, Chunk& here);
  void deliver(const Window& window, const std::byte* staged);
  Chunk gather_chunk(const ChunkPlan& chunk);
  bool is_gathered(const ChunkPlan& chunk) const;
  void note_read(const Window& window);
  void note_reads_enqueued() noexcept;
  // The one leaf of its chunk, as it is, to pinned memory or to be read by a blocking transfer.
  bool goes_straight(const ChunkPlan& chunk) const;
  std::vector<Window> windows_of_plan() const;

  const bool use_pinned_staging_;
  const std::vector<Window> windows_;  // claimed one by one
  const EventRef written_;             // behind what the caller's stream had to do with the sources
  std::vector<Chunk> gathered_;        // by chunk, where it has several windows
  std::atomic<size_t> unread_windows_;

  Mutex reads_mutex_;
  Condition reads_became_enqueued_;
  std::atomic<bool> reads_enqueued_ = false;  // written under reads_mutex_
  EventRef read_;                             // behind the last read; constant once reads_enqueued_
};

}  // namespace tdcopier
