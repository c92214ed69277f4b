// Holds of destinations.
#include "engine/into_job.h"

#include <utility>

#include "engine/graph_capture.h"
#include "engine/reclaim.h"

namespace tdcopier {

IntoJob::IntoJob(Accelerator& accelerator, const c10::Stream& stream, c10::Device target,
                 LeafPairs pairs, PackPlan plan, IntoHolds holds, ThreadPool& reclaimer)
    : CopyJob(accelerator, stream, target, std::move(pairs.leaves),
              std::make_shared<const PackPlan>(std::move(plan)), std::move(holds.sources)),
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
  if (somebody_failed()) stopped_ = behind_work(accelerator_, stream_);
  written_ = somebody_failed() ? stopped_ : arrived_;
}

IntoJob::~IntoJob() {
  if (!written_) return;
  {
    const RelaxedCapture relaxed(accelerator_.device().type());
    if (has_ended(*written_)) return;
  }
  give_back_behind(std::move(written_), destination_hold_, reclaimer_);
}

void IntoJob::give_back_sources_behind(Accelerator& source, const c10::Stream& reads) noexcept {
  const bool arrived_says_it = reads == stream_ && !somebody_failed() && arrived_;
  EventRef read = arrived_says_it ? arrived_ : behind_work(source, reads);
  if (!read) return sources_->give_back();
  give_back_behind(std::move(read), sources_, reclaimer_);
}

EventRef IntoJob::behind_work(Accelerator& accelerator, const c10::Stream& stream) noexcept {
  try {
    const RelaxedCapture relaxed(accelerator.device().type());
    return accelerator.events().record(stream);
  } catch (...) {
    return nullptr;
  }
}

}  // namespace tdcopier
