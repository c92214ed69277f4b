// Hands claim windows one by one.
#include "engine/host_into_host_job.h"

#include <utility>

#include "engine/deliver.h"

namespace tdcopier {

HostIntoHostJob::HostIntoHostJob(LeafPairs pairs, PackPlan plan, IntoHolds holds,
                                 ThreadPool& reclaimer)
    : IntoJob(Accelerator::of(c10::Device(c10::kCPU)), c10::Device(c10::kCPU), std::move(pairs),
              std::move(plan), std::move(holds), reclaimer),
      windows_(cut_windows(plan_, leaves_, kHostWindowBytes)) {}

void HostIntoHostJob::transfer_all() {
  while (!somebody_failed()) {
    interleave();
    const size_t window = next_window_++;
    if (window >= windows_.size()) break;
    copy_window(plan_, leaves_, destinations_, windows_[window]);
  }
}

}  // namespace tdcopier
