// H2D: host memory, through pinned staging buffers, to an accelerator.
#pragma once

#include <memory>
#include <vector>

#include "engine/copy_job.h"
#include "engine/stage.h"

namespace tdcopier {

class HostSourceJob final : public CopyJob {
 public:
  // Each transfer takes at most `max_window_bytes`, which fit in a staging buffer.
  HostSourceJob(Accelerator& target, LeafTable leaves, PackPlan plan, bool use_pinned_staging,
                uint64_t max_window_bytes, std::shared_ptr<SourceHold> sources);

 private:
  void allocate_chunks() override;
  size_t most_hands() const override { return windows_.size(); }
  void transfer_all() override;
  void finish_reading() noexcept override { sources_->give_back(); }
  void transfer(const Window& window);

  const bool use_pinned_staging_;
  const std::vector<Window> windows_;  // claimed one by one
};

}  // namespace tdcopier
