// One call: pair and check all leaves, capture check, versions, plan and launch, delegated leaves.
#include "python/copy_into.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "engine/device_into_device_job.h"
#include "engine/device_into_host_job.h"
#include "engine/host_into_device_job.h"
#include "engine/host_into_host_job.h"
#include "python/delegated.h"
#include "python/device_argument.h"
#include "python/pair_walk.h"
#include "python/prefetch.h"
#include "python/sort_pairs.h"
#include "python/start_copy.h"
#include "python/workers.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Copies between devices gather so much at a time.
constexpr uint64_t kMaxGatheredBytes = 32 * 1024 * 1024;

struct Started {
  std::shared_ptr<CopyJob> job;
  bool at_once;  // so little to do, and nothing to wait for: best done in the call
};

Started make_job(Handle& handle, IntoGroup group, const IntoOptions& options) {
  const StepRange range(handle.steps(), Step::kPlan);
  const c10::Device source = group.pairs.leaves.device();
  const c10::Device target = group.destination;
  IntoHolds holds{std::move(group.sources), std::move(group.destinations)};
  PackOptions host_chunks;
  host_chunks.max_chunk_bytes = kStagingBufferBytes;
  const bool pinned = options.use_pinned_staging;
  if (target.is_cpu()) {
    PackPlan plan = make_pack_plan(group.pairs.leaves.extents(), host_chunks);
    if (source.is_cpu()) {
      const bool little = plan.total_bytes <= max_inline_bytes() && !group.mapped.wait_for_disk();
      return {std::make_shared<HostIntoHostJob>(std::move(group.pairs), std::move(plan),
                                                std::move(holds), reclaimer()),
              little};
    }
    return {
        std::make_shared<DeviceIntoHostJob>(Accelerator::of(source), std::move(group.pairs),
                                            std::move(plan), pinned, std::move(holds), reclaimer()),
        false};
  }
  Accelerator& accelerator = Accelerator::of(target);
  if (!source.is_cpu()) {
    IntoPlan plan = make_into_plan(group.pairs, kMaxGatheredBytes);
    return {std::make_shared<DeviceIntoDeviceJob>(Accelerator::of(source), accelerator,
                                                  std::move(group.pairs), std::move(plan),
                                                  std::move(holds), reclaimer()),
            true};
  }
  IntoPlan plan = make_into_plan(group.pairs, kMaxGatheredBytes);
  const bool little = plan.pack.total_bytes <= max_inline_bytes() && !group.mapped.wait_for_disk();
  const bool at_once =
      little && pinned && !accelerator.staging().is_exhausted(StagingUse::kOrdered);
  const WindowBytes window_bytes = best_window_bytes(plan.pack, options.use_background_thread,
                                                     /*mapped=*/!group.mapped.empty());
  return {std::make_shared<HostIntoDeviceJob>(accelerator, std::move(group.pairs), std::move(plan),
                                              pinned, window_bytes, std::move(holds), reclaimer()),
          at_once};
}

void start_group(Handle& handle, IntoGroup group, const IntoOptions& options) {
  Started started = make_job(handle, std::move(group), options);
  bool background = false;
  if (options.use_background_thread && !started.at_once) {
    const c10::Device source = started.job->source_device();
    const bool waits_for_arrivals = !source.is_cpu() && started.job->target().is_cpu();
    background = started.job->run_in_background(waits_for_arrivals ? arrivals(source) : workers());
  }
  if (!background) {
    const py::gil_scoped_release no_gil;
    started.job->run();
  }
  handle.attach(std::move(started.job), background);
}

void add_device(std::vector<c10::Device>& devices, c10::Device device) {
  if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
}

// Moves the versions of tensors at the end of the call, whichever way it is left: by then the
// transfers run, which need the time.
class BumpAtEnd {
 public:
  // A handle gives destinations back when it is asked, or dropped: not before its call has ended.
  explicit BumpAtEnd(SortedPairs& sorted)
      : written_(std::move(sorted.written)), kept_(std::move(sorted.kept)) {
    for (const IntoGroup& group : sorted.groups) holds_.push_back(group.destinations);
  }
  BumpAtEnd(const BumpAtEnd&) = delete;
  BumpAtEnd& operator=(const BumpAtEnd&) = delete;
  ~BumpAtEnd() {
    // A counter is increased atomically, and none of the next is fetched until that is done.
    for (size_t i = 0; i < written_.size(); ++i) {
      if (i + kVersionsAhead < written_.size()) prefetch_version(written_[i + kVersionsAhead]);
      written_[i]->bump_version();
    }
  }

 private:
  const RecycledVector<c10::TensorImpl*> written_;
  const std::vector<py::object> kept_;
  std::vector<std::shared_ptr<PySources>> holds_;
};

// `copy_` for each leaf that the engine leaves to it, in this thread and under its state.
void run_delegated(Handle& handle, py::handle source, py::handle destination,
                   const SortedPairs& sorted, const py::object& fill) {
  size_t number = 0;
  try {
    for (const DelegatedPair& pair : sorted.delegated) {
      number = pair.number;
      fill(pair.destination, pair.source);
      ++handle.counts().delegated;
    }
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // an interrupt is not the copy's failure
    const py::object failure = error.value();
    if (py::hasattr(failure, "add_note")) {
      const auto path = path_of_pair(source, destination, number);
      if (path) {
        failure.attr("add_note")("tdcopier: raised by `copy_` of the leaf destination" + *path);
      }
    }
    handle.fail_with(failure);
    return;
  }
  DelegatedOutputs reads;
  reads.read = sorted.readers.events();
  handle.attach(std::move(reads));
  for (const c10::Device device : sorted.writers.devices()) {
    DelegatedOutputs writes;  // into memory of the caller's, of which nobody has to be told
    writes.stream = parse_stream(py::none(), device);
    writes.made = Accelerator::of(device).events().record(*writes.stream);
    handle.attach(std::move(writes));
  }
}

}  // namespace

std::unique_ptr<Handle> copy_into(py::handle source, py::handle destination,
                                  const IntoOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  PairsToFill work{{}, {}, py::module_::import("tdcopier._into").attr("fill"), "copy_into()"};
  {
    const StepRange range(work.steps, Step::kFlatten);
    work.pairs = sort_pairs(source, destination);
  }
  return fill_pairs(source, destination, work, options);
}

std::unique_ptr<Handle> fill_pairs(py::handle source, py::handle destination, PairsToFill& work,
                                   const IntoOptions& options) {
  SortedPairs& sorted = work.pairs;
  std::vector<c10::Device> targets = sorted.writers.devices();
  for (const IntoGroup& group : sorted.groups) add_device(targets, group.destination);
  std::vector<c10::Device> used = targets;
  for (const c10::Device device : sorted.readers.devices()) add_device(used, device);
  for (const IntoGroup& group : sorted.groups) add_device(used, group.pairs.leaves.device());
  for (const c10::Device device : used) {
    if (!device.is_cpu()) refuse_capture(parse_stream(py::none(), device), work.call);
  }

  LeafCounts counts;
  counts.packed = sorted.empty;
  counts.reused = static_cast<uint32_t>(sorted.reused.size());
  counts.opaque = sorted.opaque;
  auto handle = std::make_unique<Handle>(std::move(targets),
                                         py::reinterpret_borrow<py::object>(destination), counts);
  handle->steps().add(Step::kFlatten, work.steps.ns(Step::kFlatten));
  const BumpAtEnd bump(sorted);
  // First what may be interrupted, while no job writes yet. What fails later leaves a handle, which
  // the jobs before belong to.
  if (!sorted.delegated.empty()) {
    run_delegated(*handle, source, destination, sorted, work.fill);
  }
  try {
    for (IntoGroup& group : sorted.groups) start_group(*handle, std::move(group), options);
  } catch (...) {
    handle->fail_with(std::current_exception());
  }
  return handle;
}

}  // namespace tdcopier
