// Hands claim windows one by one.
#include "engine/host_into_host_job.h"

#include <utility>

#include "engine/deliver.h"

namespace tdcopier {
namespace {

Accelerator& host() {
  return Accelerator::of(c10::Device(c10::kCPU));
}

}  // namespace

HostIntoHostJob::HostIntoHostJob(LeafPairs pairs, PackPlan plan, IntoHolds holds,
                                 ThreadPool& reclaimer)
    : IntoJob(host(), host().ordered_stream(), host().device(), std::move(pairs), std::move(plan),
              std::move(holds), reclaimer),
      windows_(cut_windows(plan_, leaves_, WindowBytes::all(kHostWindowBytes))) {}

void HostIntoHostJob::transfer_all() {
  claim_windows(windows_, [this](const Window& window) {
    const StepRange range(steps_, Step::kStage);
    copy_window(plan_, leaves_, destinations_, window);
  });
}

}  // namespace tdcopier
