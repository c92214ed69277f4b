// H2H into memory that exists: plain copies, by several hands where there is much of it.
#pragma once

#include <vector>

#include "engine/into_job.h"
#include "engine/stage.h"

namespace tdcopier {

// So much at a time for one hand.
inline constexpr uint64_t kHostWindowBytes = 1024 * 1024;

// No device is involved, and nothing counts as a transfer.
class HostIntoHostJob final : public IntoJob {
 public:
  HostIntoHostJob(LeafPairs pairs, PackPlan plan, IntoHolds holds, ThreadPool& reclaimer);

  size_t chunks() const override { return 0; }

 private:
  void allocate_chunks() override {}
  size_t most_hands() const override { return windows_.size(); }
  void transfer_all() override;
  // Destinations stay with the job, as those of the others do.
  void finish_reading() noexcept override { sources_->give_back(); }

  const std::vector<Window> windows_;  // claimed one by one
};

}  // namespace tdcopier
