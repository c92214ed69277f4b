// D2H and D2D: leaves of one accelerator, gathered there, to the host or to another accelerator.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "engine/copy_job.h"

namespace tdcopier {

// So little is gathered straight into pinned memory, by a kernel: another transfer from a chunk on
// the device would take longer.
inline constexpr uint64_t kMaxStraightBytes = 4 * 1024 * 1024;

// Another bound, for tests and comparisons. Thread: any.
void set_max_straight_bytes(uint64_t bytes);

// The sources' bytes are read by the device, behind what their current stream has when the job is
// made. They are given back when it has done so, by `reclaimer`'s thread.
class DeviceSourceJob final : public CopyJob {
 public:
  // `target` is the host or another accelerator of the same type. `pinned`: what arrives on the
  // host is pinned memory.
  // Thread: the caller's, whose current stream of the sources' device counts.
  DeviceSourceJob(Accelerator& source, c10::Device target, LeafTable leaves,
                  std::shared_ptr<const PackPlan> plan, bool pinned,
                  std::shared_ptr<SourceHold> sources, ThreadPool& reclaimer);

  uint64_t host_bytes() const override { return 0; }
  void order_behind_reads(const c10::Stream& stream) override;

 private:
  void allocate_chunks() override;
  void transfer_all() override;
  void finish_reading() noexcept override;
  void transfer(const ChunkPlan& plan, const Chunk& chunk);
  bool is_gathered_straight(const ChunkPlan& plan) const;
  void gather_to(const ChunkPlan& plan, std::byte* memory);
  void gather_straight(const ChunkPlan& plan, const Chunk& chunk);
  void note_gathered(const ChunkPlan& plan);
  void enqueue(const void* address, const Chunk& chunk, uint64_t bytes);

  Accelerator& source_;
  const c10::Stream& reads_;  // of the sources' device
  const bool pinned_;
  ThreadPool& reclaimer_;
  const EventRef written_;  // behind what the caller's stream had to do with the sources
  EventRef read_;           // behind the last read of a source; constant once enqueued
};

}  // namespace tdcopier
