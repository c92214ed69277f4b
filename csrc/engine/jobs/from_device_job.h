// D2H to new memory, and D2D to new or existing memory, on another device or the same. Reads after
// the caller's work on the sources' device; engine/device/accelerator.h chooses the streams.
// Bytes on the host may be read after CopyJob::wait_done().
#pragma once

#include <cstddef>
#include <memory>

#include "engine/jobs/copy_job.h"

namespace tdcopier {

// Up to this size a kernel gathers leaves straight into pinned memory: to gather them on the device
// and transfer them from there would take longer.
inline constexpr uint64_t kMaxStraightBytes = 4 * 1024 * 1024;
// Chunks are gathered in groups of up to this size.
inline constexpr uint64_t kMaxGatheredBytes = 32 * 1024 * 1024;

// Replaces kMaxStraightBytes, for tests and comparisons. Thread: any.
void set_max_straight_bytes(uint64_t bytes);

// Returns the transfers of a copy of these leaves from their device to new memory. Copies nothing.
TransferCounts transfers_from_device(const LeafTable& leaves, const PackPlan& plan,
                                     c10::Device target, bool pinned);

// A copy from a device. It reads the sources after the work that their device's current stream has
// when the job is created, and writes destinations after the work that their device's has. A copy
// within one device makes no transfers.
class FromDeviceJob final : public CopyJob {
 public:
  // `pinned`: results on the host are in pinned memory. Thread: the caller's, because its current
  // streams are used.
  FromDeviceJob(Accelerator& source, c10::Device target, CopyWork work, bool pinned);

  uint64_t host_bytes() const override { return 0; }
  size_t chunks() const override;

 private:
  void transfer_all() override;
  size_t gather_and_transfer(size_t first);
  void gather_straight(size_t first, size_t last);
  void note_written(size_t first, size_t last);  // chunks of a result on the host
  void transfer(size_t chunk, const std::byte* from);

  Accelerator& source_;
  const bool pinned_;
  const bool within_;                  // within one device, into existing memory
  const EventRef sources_ready_;       // after the caller's work on the sources
  const EventRef destinations_ready_;  // after its work on the destinations; null: new memory
};

}  // namespace tdcopier
