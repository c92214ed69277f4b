// H2H: rows of host memory into new memory there, and host memory into host memory that exists.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/copy_job.h"
#include "engine/stage.h"

namespace tdcopier {

// This much at a time for one participant.
inline constexpr uint64_t kHostWindowBytes = 1024 * 1024;

// No device is involved, and nothing counts as a transfer. New memory is laid out as a later copy
// to a device would lay it out, which sends it as it is if it is pinned.
class HostJob final : public CopyJob {
 public:
  HostJob(CopyWork work, WindowBytes window_bytes);

 private:
  size_t most_participants() const override { return windows_.size(); }
  bool can_be_helped() const override { return true; }
  void transfer_all() override;
  void copy(const Window& window);

  const std::vector<Window> windows_;  // claimed one by one
};

}  // namespace tdcopier
