// D2D into memory that exists, on another device or on the same one.
#pragma once

#include <vector>

#include "engine/into_job.h"

namespace tdcopier {

// The sources are read behind what their current stream has when the job is made, and the
// destinations are written behind what theirs has. Nothing is transferred within one device.
class DeviceIntoDeviceJob final : public IntoJob {
 public:
  // Thread: the caller's, whose current streams of both devices count.
  DeviceIntoDeviceJob(Accelerator& source, Accelerator& target, LeafPairs pairs, IntoPlan plan,
                      IntoHolds holds, ThreadPool& reclaimer);

  size_t chunks() const override { return scattered_; }
  void order_behind_reads(const c10::Stream& stream) override;

 private:
  void allocate_chunks() override {}  // one by one, each where it is needed
  void transfer_all() override;
  void finish_reading() noexcept override;
  void transfer(size_t chunk);
  // Of the target's copy stream: allocators serve the current device.
  Chunk allocate_on_target(const ChunkPlan& plan);
  void send(const ChunkPlan& plan, const ChunkRuns& runs, const std::byte* image);

  Accelerator& source_;
  const c10::Stream reads_;  // of the sources' device
  const std::vector<Run> runs_;
  const std::vector<ChunkRuns> chunk_runs_;
  const size_t scattered_;  // how many of the chunks are
  const EventRef written_;  // behind what the caller's stream had to do with the sources
  const EventRef used_;     // behind what it had to do with the target
  EventRef read_;           // behind the last read of a source; constant once enqueued
};

}  // namespace tdcopier
