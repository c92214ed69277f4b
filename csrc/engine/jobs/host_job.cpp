// Participants claim windows one by one, and write each to its final place.
#include "engine/jobs/host_job.h"

#include <utility>

#include "engine/moves/deliver.h"
#include "engine/moves/stage.h"

namespace tdcopier {
namespace {

Accelerator& host() {
  return Accelerator::of(c10::Device(c10::kCPU));
}

}  // namespace

HostJob::HostJob(CopyWork work, std::vector<Window> windows)
    : CopyJob(host(), host().to_device_stream(), nullptr, host().device(), std::move(work)),
      windows_(std::move(windows)) {}

void HostJob::transfer_all() {
  while (!is_failing()) {
    interleave();
    const size_t claimed = claim();
    if (claimed >= windows_.size()) break;
    const PhaseRange range(phases_, Phase::kStage);
    copy(windows_[claimed]);
  }
}

void HostJob::copy(const Window& window) {
  if (!work_.result) return copy_window(plan_, leaves_, work_.destinations, window);
  for_each_chunk_in_window(plan_, window, [&](size_t i, uint64_t begin, uint64_t end, uint64_t) {
    const uint64_t chunk = plan_.chunks[i].begin;
    stage_window(plan_, leaves_, {chunk + begin, chunk + end}, work_.result->address(i) + begin,
                 StoreTo::kOwnCache);
  });
}

}  // namespace tdcopier
