// H2H: rows of host memory, gathered into chunks of host memory.
#pragma once

#include <vector>

#include "engine/copy_job.h"
#include "engine/stage.h"

namespace tdcopier {

// No device is involved, and nothing counts as a transfer. Chunks are what a later copy to a device
// sends as they are: pinned, and laid out as its own would be.
class HostRowsJob final : public CopyJob {
 public:
  // `allocator` is for host memory.
  HostRowsJob(LeafTable leaves, std::shared_ptr<const PackPlan> plan, c10::Allocator* allocator,
              WindowBytes window_bytes, std::shared_ptr<SourceHold> sources);

 private:
  void allocate_chunks() override;
  size_t most_hands() const override { return windows_.size(); }
  void transfer_all() override;
  void finish_reading() noexcept override { sources_->give_back(); }

  c10::Allocator* const allocator_;
  const std::vector<Window> windows_;  // claimed one by one
};

}  // namespace tdcopier
