// H2H: gathers rows into new host memory, and copies host memory into existing host memory.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/jobs/copy_job.h"
#include "engine/moves/windows.h"

namespace tdcopier {

// A copy within host memory. No device is involved, and nothing counts as a transfer. New memory
// has the layout of a later copy to a device, which can send it as it is if it is pinned.
class HostJob final : public CopyJob {
 public:
  HostJob(CopyWork work, std::vector<Window> windows);

 private:
  size_t parts() const override { return windows_.size(); }
  bool can_be_helped() const override { return true; }
  void transfer_all() override;
  void copy(const Window& window);

  const std::vector<Window> windows_;  // claimed one by one
};

}  // namespace tdcopier
