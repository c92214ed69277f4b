// D2H into memory that exists: large pinned destinations are written by the device, others by
// participants that wait for what arrives in staging buffers.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "engine/copy_job.h"
#include "engine/stage.h"

namespace tdcopier {

// The job is enqueued when the last byte that a participant writes is written. They wait for the
// device, so they belong to a pool of their own, where no staging waits for them. A window is at
// most one chunk, and a chunk of several leaves is one window.
class DeviceToHostJob final : public CopyJob {
 public:
  // Requires: packed chunks fit in a staging buffer.
  // Thread: the caller's, whose current stream of the sources' device counts.
  DeviceToHostJob(Accelerator& source, CopyWork work, bool use_pinned_staging);

 private:
  size_t most_participants() const override { return windows_.size(); }
  void transfer_all() override;
  void finish() noexcept override;
  void transfer(const Window& window);
  void transfer_straight(const Window& window, size_t chunk);
  void transfer_staged(const Window& window, size_t chunk);
  void transfer_pageable(const Window& window, size_t chunk);
  // Where the window's bytes are on the device: gathered into `here`, if need be.
  const std::byte* image_of(const Window& window, size_t chunk, c10::Storage& here);
  c10::Storage gather_chunk(size_t chunk);
  void deliver(const Window& window, const std::byte* staged);
  void note_read(const Window& window);
  bool is_gathered(const ChunkPlan& chunk) const;
  // The one leaf of its chunk, as it is, to pinned memory or to be read by a blocking transfer.
  bool goes_straight(const ChunkPlan& chunk) const;
  std::vector<Window> windows_of_plan() const;

  const bool use_pinned_staging_;
  const std::vector<Window> windows_;   // claimed one by one
  const EventRef written_;              // after what the caller's stream does to the sources
  std::vector<c10::Storage> gathered_;  // by chunk, of those with several windows
  std::atomic<size_t> unread_windows_;
};

}  // namespace tdcopier
