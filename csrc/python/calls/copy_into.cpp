// The steps of one call: pair and check all leaves, refuse captures, replace opaque values, run
// delegated leaves, plan and start one job per group, bump versions.
#include "python/calls/copy_into.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/device/graph_capture.h"
#include "python/calls/call_to.h"
#include "python/calls/start_copy.h"
#include "python/runtime/cache_prefetch.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/hooks.h"
#include "python/runtime/interrupts.h"
#include "python/walk/delegated_outputs.h"
#include "python/walk/pair_walk.h"
#include "python/walk/row_leaves.h"
#include "python/walk/sort_pairs.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// The differences between the three calls.
struct FillCall {
  PairNames names;
  TablesOfPairs tables;
  py::object fill;  // fill(destination, source), for delegated leaves
  bool copy_opaque;
};

LeafGroup group_for(IntoGroup&& group, const CopyOptions& options) {
  if (options.reads_pinned_in_place && group.pairs.leaves.device().is_cpu()) {
    group.pairs.leaves.find_pinned();
  }
  CopyWork work{std::make_shared<const LeafTable>(std::move(group.pairs.leaves)), nullptr,
                std::move(group.sources)};
  work.destinations = std::move(group.pairs.destinations);
  work.kept_destinations = std::move(group.destinations);
  return {group.destination, std::move(work), group.mapped, std::move(group.in_place)};
}

// Adds the rows to the graph that the caller's stream is capturing.
void capture_group(Handle& handle, const LeafGroup& group) {
  try {
    const PhaseRange range(handle.phases(), Phase::kPlan);
    const RelaxedCapture relaxed(mover(group).type());
    handle.attach(CapturedRows{capture(group), group.work.sources, group.work.kept_destinations});
  } catch (...) {
    handle.fail_with(std::current_exception());
  }
}

// Bumps the versions of written tensors when the call ends, normally or with an exception. By then
// the transfers are running, so the bumps overlap with them.
class BumpAtEnd {
 public:
  // Keeps the tensors alive: code that runs during the call may drop them.
  explicit BumpAtEnd(SortedPairs& sorted)
      : written_tensors_(std::move(sorted.written)), kept_(std::move(sorted.kept)) {}
  BumpAtEnd(const BumpAtEnd&) = delete;
  BumpAtEnd& operator=(const BumpAtEnd&) = delete;
  ~BumpAtEnd() {
    // The increments are atomic, and the processor fetches no later counter until one is done.
    const size_t ahead = prefetch_distance(kVersionsAhead);
    for (size_t i = 0; i < written_tensors_.size(); ++i) {
      if (i + ahead < written_tensors_.size()) prefetch_version(written_tensors_[i + ahead]);
      written_tensors_[i]->bump_version();
    }
  }

 private:
  const RecycledVector<c10::TensorImpl*> written_tensors_;
  const RecycledVector<py::object> kept_;
};

// Calls `copy_` for each delegated leaf, in this thread and under its torch state.
void run_delegated(Handle& handle, py::handle source, py::handle destination,
                   const SortedPairs& sorted, const py::object& fill) {
  // Their code may give other leaves new memory.
  for (const IntoGroup& group : sorted.groups) group.sources->keep_memory_of_tensors();
  size_t number = 0;
  try {
    for (const DelegatedPair& pair : sorted.delegated) {
      number = pair.number;
      fill(pair.destination, pair.source);
      ++handle.counts().delegated;
    }
  } catch (py::error_already_set& error) {
    return fail_with_leaf(handle, error, "copy_", [&] {
      std::optional<std::string> path = path_of_pair(source, destination, number);
      return path ? "destination" + *path : path;
    });
  }
  try {
    const CountFallbacks counted(handle.fallbacks());
    DelegatedOutputs reads;
    reads.read = sorted.readers.events();
    handle.attach(std::move(reads));
    for (const c10::Device device : sorted.writers.devices()) {
      DelegatedOutputs writes;  // no storages: the caller owns the memory, so it is not recorded
      writes.stream = parse_stream(py::none(), device);
      writes.made = event_after(*writes.stream);
      handle.attach(std::move(writes));
    }
  } catch (...) {  // the device has failed
    handle.fail_with(std::current_exception());
  }
}

// Returns whether the rows of all pairs are moved in place by a device whose current stream is
// capturing a graph.
bool is_captured(const SortedPairs& sorted) {
  if (sorted.groups.empty() || !sorted.delegated.empty()) return false;
  return std::ranges::all_of(sorted.groups, [](const IntoGroup& group) {
    const c10::Device source = group.pairs.leaves.device();
    const c10::Device mover = source.is_cpu() ? group.destination : source;
    return group.in_place && is_capturing(parse_stream(py::none(), mover));
  });
}

// Sorts the pairs, and refuses captures by streams that the copy needs.
SortedPairs sort_and_check(py::handle source, py::handle destination, const FillCall& call,
                           bool list_opaque) {
  SortedPairs sorted = sort_pairs(source, destination, call.names, call.tables, list_opaque);
  LeafDevices used = sorted.writers;
  for (const c10::Device device : sorted.readers.devices()) used.add(device);
  for (const IntoGroup& group : sorted.groups) {
    used.add(group.destination);
    used.add(group.pairs.leaves.device());
  }
  if (is_captured(sorted)) return sorted;
  for (const c10::Device device : used.devices()) {
    if (!device.is_cpu()) refuse_capture(parse_stream(py::none(), device));
  }
  return sorted;
}

// Replaces the opaque values of the destination that differ. Returns an object that keeps the old
// ones alive, whose code is not to run before the leaves have been read.
py::object replace_opaque(SortedPairs& sorted, py::handle source, py::handle destination,
                          const FillCall& call) {
  if (sorted.opaque_differences == 0) return py::none();
  const py::object replacements = hooks().replacements(sorted.opaque_pairs);
  sorted.opaque_differences = 0;
  if (!replacements.attr("write")().cast<bool>()) return replacements;
  // The code of containers may have moved the memory of leaves, and changed the values.
  try {
    sorted = sort_and_check(source, destination, call, /*list_opaque=*/false);
  } catch (...) {
    replacements.attr("undo")();
    throw;
  }
  return replacements;
}

std::unique_ptr<Handle> fill_tree(py::handle source, py::handle destination, const FillCall& call,
                                  const CopyOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  PhaseTimes phases;  // until there is a handle
  py::object replaced;
  SortedPairs sorted = [&] {
    const PhaseRange range(phases, Phase::kFlatten);
    SortedPairs found = sort_and_check(source, destination, call, call.copy_opaque);
    if (call.copy_opaque) replaced = replace_opaque(found, source, destination, call);
    return found;
  }();
  LeafDevices targets = sorted.writers;
  for (const IntoGroup& group : sorted.groups) targets.add(group.destination);

  LeafCounts counts;
  counts.packed = sorted.empty;
  counts.reused = sorted.reused;
  counts.opaque = sorted.opaque;
  counts.opaque_differences = sorted.opaque_differences;
  auto handle = std::make_unique<Handle>(targets.devices(),
                                         py::reinterpret_borrow<py::object>(destination), counts);
  handle->phases().add(Phase::kFlatten, phases.ns(Phase::kFlatten));
  const BumpAtEnd bump(sorted);
  const bool captures = is_captured(sorted);
  // Delegated leaves may be interrupted, so they run before any job writes. Later failures are
  // stored in the handle, which owns the jobs that were started before.
  if (!sorted.delegated.empty()) {
    run_delegated(*handle, source, destination, sorted, call.fill);
  }
  for (IntoGroup& group : sorted.groups) {
    if (run_signal_handlers()) break;
    LeafGroup leaves = group_for(std::move(group), options);
    if (captures) {
      capture_group(*handle, leaves);
    } else {
      start_group(*handle, std::move(leaves), options);
    }
  }
  if (run_signal_handlers()) {
    handle->wait_stopped();  // the caller gets no handle to wait with
    raise_if_interrupted();
  }
  return handle;
}

RowRequest request_for(py::handle index, const CopyOptions& options) {
  RowRequest request = row_request_of(index);
  request.may_be_in_place = options.use_pinned_staging;
  return request;
}

}  // namespace

std::unique_ptr<Handle> start_copy_into(py::handle source, py::handle destination, py::object fill,
                                        const CopyOptions& options, bool copy_opaque) {
  return fill_tree(source, destination, {{}, {}, std::move(fill), copy_opaque}, options);
}

std::unique_ptr<Handle> start_scatter(py::handle batch, py::handle storage, py::handle index,
                                      py::object fill, const CopyOptions& options) {
  RowLeaves rows(request_for(index, options));
  const TablesOfPairs tables{&rows, /*are_sources=*/false};
  return fill_tree(batch, storage, {{"batch", "storage"}, tables, std::move(fill), false}, options);
}

std::unique_ptr<Handle> start_gather_into(py::handle storage, py::handle out, py::handle index,
                                          py::object fill, const CopyOptions& options) {
  BadRowWatch::raise_of_dropped();
  RowLeaves rows(request_for(index, options));
  const TablesOfPairs tables{&rows, /*are_sources=*/true};
  return fill_tree(storage, out, {{"storage", "out"}, tables, std::move(fill), false}, options);
}

}  // namespace tdcopier
