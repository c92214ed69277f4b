// Hands claim windows one by one, and write each to where it stays.
#include "engine/host_rows_job.h"

#include <utility>

namespace tdcopier {
namespace {

Accelerator& host() {
  return Accelerator::of(c10::Device(c10::kCPU));
}

}  // namespace

HostRowsJob::HostRowsJob(LeafTable leaves, std::shared_ptr<const PackPlan> plan,
                         c10::Allocator* allocator, WindowBytes window_bytes,
                         std::shared_ptr<SourceHold> sources)
    : CopyJob(host(), host().to_device_stream(), host().device(), std::move(leaves),
              std::move(plan), std::move(sources)),
      allocator_(allocator),
      windows_(cut_windows(plan_, leaves_, window_bytes)) {}

void HostRowsJob::allocate_chunks() {
  chunks_.reserve(plan_.chunks.size());
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(allocate_chunk(allocator_, target_, chunk));
  }
}

void HostRowsJob::transfer_all() {
  claim_windows(windows_, [this](const Window& window) {
    stage(window, chunks_[window.chunk].at(window.begin));
  });
}

}  // namespace tdcopier
