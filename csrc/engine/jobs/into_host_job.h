// D2H into existing memory: the device writes large pinned destinations itself, and participants
// write the others from staging buffers. Their bytes may be read after CopyJob::wait_done().
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "engine/jobs/copy_job.h"
#include "engine/moves/windows.h"

namespace tdcopier {

// A copy from a device into existing host memory. It is enqueued when the participants have written
// their last byte. They wait for the device, so they have a pool of their own, where no staging
// waits for them. A window covers at most one chunk, and a chunk of several leaves is one window.
class IntoHostJob final : public CopyJob {
 public:
  // `straight`: chunks that are one contiguous leaf, and go straight to its destination: to pinned
  // memory, or by a blocking transfer. Each is one window. Requires: packed chunks fit in a staging
  // buffer. Thread: the caller's, because its current stream of the sources' device is used.
  IntoHostJob(Accelerator& source, CopyWork work, bool use_pinned_staging,
              std::vector<size_t> straight, std::vector<Window> windows);

 private:
  size_t parts() const override { return windows_.size(); }
  void transfer_all() override;
  void finish() noexcept override;
  void transfer(const Window& window);
  void transfer_straight(const Window& window, size_t chunk);
  void transfer_staged(const Window& window, size_t chunk);
  void transfer_pageable(const Window& window, size_t chunk);
  // Returns the window's bytes on the device, gathered into `here` if necessary.
  const std::byte* image_of(const Window& window, size_t chunk, c10::Storage& here);
  c10::Storage gather_chunk(size_t chunk);
  void deliver(const Window& window, const std::byte* staged);
  void note_read(const Window& window);
  bool is_gathered(const ChunkPlan& chunk) const;

  const bool use_pinned_staging_;
  const std::vector<size_t> straight_;  // in ascending order
  const std::vector<Window> windows_;   // claimed one by one
  const EventRef sources_ready_;        // after the caller's work on the sources
  std::vector<c10::Storage> gathered_;  // by chunk, for chunks of several windows
  std::atomic<size_t> unread_windows_;
};

}  // namespace tdcopier
