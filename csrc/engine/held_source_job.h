// H2D in two halves: workers stage a batch, and whoever is to use it puts its transfers on the copy
// stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "engine/copy_job.h"
#include "engine/held_memory.h"
#include "engine/stage.h"

namespace tdcopier {

// So many workers stage a held batch. Nobody waits for it, and beside a loop whose host is busy
// more of them take more from it than they give: 38 MB of rows cost it 5 % by 12 workers, 4 % by 4.
inline constexpr size_t kMostHeldHands = 4;

// For a loop that enqueues kernels all the time: the driver lets one thread in at a time, and a
// thread that comes while another is there sleeps. Workers that enqueue transfers beside the loop
// hold it up by about 20 us for each. So the loop's own thread does it, when it is at leisure.
class HeldSourceJob final : public CopyJob {
 public:
  // Requires: every chunk of the plan is staged. `lease` has the bytes of all chunks.
  HeldSourceJob(Accelerator& target, LeafTable leaves, std::shared_ptr<const PackPlan> plan,
                WindowBytes window_bytes, std::shared_ptr<SourceHold> sources, HeldLease lease);

  void send() noexcept override;
  bool is_done() override;
  void wait_enqueued() override;
  void wait_reads_enqueued() override { wait_staged(); }
  bool are_reads_enqueued() const override { return staged_.load(std::memory_order_acquire); }

 private:
  void allocate_chunks() override;
  size_t most_hands() const override { return std::min(windows_.size(), kMostHeldHands); }
  void transfer_all() override;
  void finish_hands() noexcept override;
  void finish_reading() noexcept override { sources_->give_back(); }
  void enqueue_all();
  void hold_until_read();
  void wait_staged();

  const uint32_t generation_;          // of the process that made it: a child sends nothing
  const std::vector<Window> windows_;  // claimed one by one
  std::vector<uint64_t> begins_;       // of chunks, in the lease's memory
  HeldLease lease_;
  Mutex staged_mutex_;
  Condition became_staged_;
  std::atomic<bool> staged_ = false;  // or failed; written under staged_mutex_
  Mutex sending_;                     // nobody enqueues the same twice
};

}  // namespace tdcopier
