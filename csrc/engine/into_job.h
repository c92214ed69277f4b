// What all jobs share that fill existing memory: they hand over nothing, and keep their
// destinations until these are written.
#pragma once

#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "engine/copy_job.h"
#include "engine/destination.h"
#include "engine/into_plan.h"

namespace tdcopier {

// Whoever keeps the memory alive that a job reads and writes.
struct IntoHolds {
  std::shared_ptr<SourceHold> sources;
  std::shared_ptr<SourceHold> destinations;
};

class IntoJob : public CopyJob {
 public:
  // A job that goes before its transfers are done leaves the destinations to the reclaimer.
  ~IntoJob() override;

  // The destinations belong to the caller: no allocator has to be told who reads them.
  void hand_over_to(const c10::Stream& stream) final;
  void give_back_sources() noexcept final;
  bool has_outputs() const final { return false; }

 protected:
  IntoJob(Accelerator& accelerator, const c10::Stream& stream, c10::Device target, LeafPairs pairs,
          PackPlan plan, IntoHolds holds, ThreadPool& reclaimer);

  // From here on the destinations are given back when all that has been enqueued for them is done:
  // by whoever knows the job to be done, or with the job, whose handle has them as its result.
  // Nobody has to be woken for that. A failed job is not done before.
  void give_back_destinations() noexcept;
  // Gives back sources that a device reads when all on `reads`, a stream of theirs, is done.
  void give_back_sources_behind(Accelerator& source, const c10::Stream& reads) noexcept;

  const DestinationTable destinations_;

 private:
  // An event behind all on the stream; null if the device has failed: it does no more, and get()
  // says how.
  static EventRef behind_work(Accelerator& accelerator, const c10::Stream& stream) noexcept;

  const std::shared_ptr<SourceHold> destination_hold_;
  EventRef written_;  // behind all that writes destinations; null: nothing does any more
  ThreadPool& reclaimer_;
};

}  // namespace tdcopier
