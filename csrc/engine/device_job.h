// D2H to new memory, D2D to new memory and to memory that exists, on another device or on the same.
#pragma once

#include <cstddef>
#include <memory>

#include "engine/copy_job.h"

namespace tdcopier {

// Up to this size leaves are gathered straight into pinned memory, by a kernel: another transfer
// from scratch memory on the device would take longer.
inline constexpr uint64_t kMaxStraightBytes = 4 * 1024 * 1024;
// This much is gathered at a time.
inline constexpr uint64_t kMaxGatheredBytes = 32 * 1024 * 1024;

// Another bound, for tests and comparisons. Thread: any.
void set_max_straight_bytes(uint64_t bytes);

// The sources are read after what their current stream has when the job is made, and destinations
// are written after what theirs has. Nothing is transferred within one device.
class DeviceJob final : public CopyJob {
 public:
  // `pinned`: results on the host are pinned memory.
  // Thread: the caller's, whose current streams count.
  DeviceJob(Accelerator& source, c10::Device target, CopyWork work, bool pinned);

  uint64_t host_bytes() const override { return 0; }
  size_t chunks() const override;

 private:
  void transfer_all() override;
  size_t gather_and_transfer(size_t first);
  size_t end_of_group(size_t first) const;
  bool is_in_place(const ChunkPlan& chunk) const;
  bool can_gather_straight(size_t first, size_t last) const;
  void gather_straight(size_t first, size_t last);
  void note_written(size_t first, size_t last);  // chunks of a result on the host
  void transfer(size_t chunk, const std::byte* from);

  Accelerator& source_;
  const bool pinned_;
  const bool within_;       // one device, into memory that exists
  const EventRef written_;  // after what the caller's stream does to the sources
  const EventRef used_;     // after what it does to the destinations; null: new memory
};

}  // namespace tdcopier
