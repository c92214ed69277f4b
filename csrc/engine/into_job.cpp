// Holds of destinations.
#include "engine/into_job.h"

#include <utility>

#include "engine/graph_capture.h"
#include "engine/reclaim.h"

namespace tdcopier {

IntoJob::IntoJob(Accelerator& accelerator, c10::Device target, LeafPairs pairs, PackPlan plan,
                 IntoHolds holds, ThreadPool& reclaimer)
    : CopyJob(accelerator, target, std::move(pairs.leaves), std::move(plan),
              std::move(holds.sources)),
      destinations_(std::move(pairs.destinations)),
      destination_hold_(std::move(holds.destinations)),
      reclaimer_(reclaimer) {}

void IntoJob::hand_over_to(const c10::Stream& stream) {
  if (!arrived_) return;
  const RelaxedCapture relaxed(stream.device_type());
  arrived_->block(stream);
}

void IntoJob::give_back_sources() noexcept {
  sources_->give_back();
  destination_hold_->give_back();
}

void IntoJob::give_back_destinations() noexcept {
  give_back_behind_work(accelerator_, destination_hold_, somebody_failed() ? nullptr : arrived_);
}

void IntoJob::give_back_sources_behind(Accelerator& source) noexcept {
  const bool arrived_says_it = &source == &accelerator_ && !somebody_failed();
  give_back_behind_work(source, sources_, arrived_says_it ? arrived_ : nullptr);
}

void IntoJob::give_back_behind_work(Accelerator& accelerator,
                                    const std::shared_ptr<SourceHold>& hold,
                                    const EventRef& known) noexcept {
  EventRef done = known;
  try {
    const RelaxedCapture relaxed(accelerator.device().type());
    if (!done) done = accelerator.events().record(accelerator.copy_stream());
  } catch (...) {  // the device has failed: it does no more, and get() says how
    hold->give_back();
    return;
  }
  give_back_behind(std::move(done), hold, reclaimer_);
}

}  // namespace tdcopier
