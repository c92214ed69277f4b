// H2D into memory that exists: through pinned staging buffers, straight to where it belongs, or by
// way of a chunk that the device scatters.
#pragma once

#include <vector>

#include "base/combiner.h"
#include "engine/into_job.h"
#include "engine/stage.h"
#include "engine/staged_window.h"

namespace tdcopier {

// The device writes behind what its current stream has when the job is made.
class HostIntoDeviceJob final : public IntoJob {
 public:
  // Thread: the caller's, whose current stream of the target counts.
  HostIntoDeviceJob(Accelerator& target, LeafPairs pairs, IntoPlan plan, bool use_pinned_staging,
                    WindowBytes window_bytes, IntoHolds holds, ThreadPool& reclaimer);

  size_t chunks() const override;

 private:
  void allocate_chunks() override;
  size_t most_hands() const override { return windows_.size(); }
  void transfer_all() override;
  void finish_transfers() override;
  void finish_reading() noexcept override;
  void transfer(const Window& window);
  void enqueue(StagedWindow staged);
  // Calls send(place in the window, address on the device, bytes) for each part of the window that
  // lies together there.
  template <typename Send>
  void send_parts(const Window& window, const Send& send);

  const bool use_pinned_staging_;
  const std::vector<Run> runs_;
  const std::vector<ChunkRuns> chunk_runs_;
  const std::vector<Window> windows_;  // claimed one by one
  Combiner<StagedWindow> staged_;      // the driver takes one thread at a time
  const EventRef used_;                // behind what the caller's stream had to do with the target
  std::vector<Chunk> scattered_;       // by chunk, empty where there is none to scatter
};

}  // namespace tdcopier
