// The handle of a copy: owns the treespec, the jobs, and the result once it is built.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <vector>

#include "engine/device/bad_rows.h"
#include "engine/device/fallbacks.h"
#include "engine/jobs/copy_job.h"
#include "python/handle/device_access.h"
#include "python/handle/kept_outputs.h"
#include "python/walk/delegated_outputs.h"
#include "python/walk/sources.h"
#include "python/walk/tree.h"

namespace tdcopier {

struct LeafCounts {
  uint32_t packed = 0;
  uint32_t alone = 0;
  uint32_t delegated = 0;
  uint32_t reused = 0;
  uint32_t opaque = 0;
  uint32_t opaque_differences = 0;
  uint32_t rows_in_place = 0;  // tables whose rows a device reads or writes
  uint32_t left = 0;           // tables whose rows were read by their own code
};

// Rows that a graph moves in each replay, and what it accesses then.
struct CapturedRows {
  std::shared_ptr<BadRowWatch> watch;  // null: their numbers are not on the device
  std::shared_ptr<KeepAlive> sources;
  std::shared_ptr<KeepAlive> destinations;
};

// The class tdcopier.AsyncCopyHandle. Thread: any that holds the GIL. GIL: held for every member;
// released inside while waiting.
class Handle {
 public:
  Handle(c10::Device target, TreeSpec spec, LeafCounts counts);
  // For a copy into `result`, which writes leaves on the devices `targets`.
  Handle(std::vector<c10::Device> targets, pybind11::object result, LeafCounts counts);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // The following are called by start_copy and copy_into, before the caller sees the handle.
  // Adds the job of the tree's next group.
  void attach(std::shared_ptr<CopyJob> job, bool background);
  void attach(DelegatedOutputs delegated) { delegated_.push_back(std::move(delegated)); }
  void attach(CapturedRows captured) { captured_.push_back(std::move(captured)); }
  void fail_with(pybind11::object exception);
  void fail_with(std::exception_ptr failure) { device_failure_ = std::move(failure); }
  // Makes the result reuse tensors of `kept`, and leave its own there for later results. `owner`
  // keeps `kept` alive.
  void reuse_outputs(pybind11::object owner, KeptOutputs& kept) {
    owner_of_kept_ = std::move(owner);
    kept_ = &kept;
  }
  TreeSpec& spec() { return *spec_; }
  LeafCounts& counts() { return counts_; }
  FallbackCount& fallbacks() { return fallbacks_; }  // of delegated leaves
  PhaseTimes& phases() { return phases_; }

  // Builds the result, while the transfer runs rather than at the hand-over, if every job is
  // enqueued and none has failed. Stores an error of a container's own code for get() and wait().
  void build_early();

  bool ready();
  // For `repr`: the number of leaves, where they go, and whether they have arrived.
  std::string described();
  pybind11::object get();
  pybind11::object wait(pybind11::handle stream) { return order(stream, /*for_reads=*/true); }
  // As wait(), but the host does not wait until a device has read host sources: see
  // device_access().
  pybind11::object hand_over(pybind11::handle stream) { return order(stream, /*for_reads=*/false); }
  // Returns the device's accesses to host memory that is not the result's, with those of host
  // threads done. Blocks: until all transfers are enqueued, and host threads have written their
  // part. Throws: as wait().
  std::unique_ptr<DeviceAccess> device_access();
  void wait_staged();
  // Returns the result as soon as every transfer is enqueued, which is before its bytes arrive.
  // Throws what made the copy fail until then. Blocks: until it is enqueued.
  pybind11::object enqueued();
  // Sends a deferred copy if it is completely staged. Returns whether all of it is now enqueued.
  // Never blocks.
  bool send_if_staged();
  // Returns whether wait() would return, or throw, without waiting for the copy. Never blocks.
  bool is_wait_instant();
  // In a forked child: whether the copy may not be done, of which only the parent can ask.
  bool is_unknown_in_child() const;
  void refuse_in_child() const;   // throws in a forked child: the parent's threads work on the copy
  pybind11::tuple stats() const;  // in the order of CopyStats' fields

  // Blocks: until the copy writes nothing any more. Cannot be interrupted.
  void wait_stopped();

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  pybind11::object order(pybind11::handle stream, bool for_reads);
  pybind11::object result_of_capture(pybind11::handle stream);
  // Returns whether this is a forked child of the process that started the copy. It makes no call
  // for the copy to the device, nor to torch's allocators: a thread of the parent may have held one
  // of their locks during the fork, and none is in the child to release it.
  bool is_of_parent() const;
  void check_numbers() const;  // throws if a device has found one out of range
  bool is_enqueued() const;
  bool has_failed() const;  // Requires: is_enqueued()
  // Participates in the jobs, or only in those with host sources. GIL: must not be held.
  void help(bool host_sources_only) const;
  void wait_enqueued();
  void wait_done(bool on_host_only);
  // Blocks: until every host source has been read, after which the caller may write to it.
  void wait_host_sources_read();
  // Returns the current stream of the source device of each job that reads from a device.
  std::vector<c10::Stream> producers() const;
  void order_after_reads(const std::vector<c10::Stream>& producers);
  void wait_stopped_if_failed();  // does nothing unless the copy fills existing memory
  // Waits until everything, or only the jobs that target the host, is done, and returns the
  // device's first error. Blocks. GIL: either way. Throws: Interrupted.
  std::exception_ptr synchronize(bool on_host_only = false) const;
  // Returns one stream for each target that has streams: the given one or the current one.
  std::vector<c10::Stream> consumers(pybind11::handle stream) const;
  void release_kept();
  // Failures of the jobs too, which keep theirs: CopyJob::fail().
  void raise_if_failed();
  void build_while_staged();
  void build_unless_refused();  // stores an error of a container's own code
  void build_once();
  void forget_kept();
  pybind11::object times() const;  // microseconds by phase; None if phases were not timed
  void hand_over_to(const std::vector<c10::Stream>& streams);

  const std::vector<c10::Device> targets_;
  const bool fills_;           // the copy fills existing memory
  const bool inference_mode_;  // at the call: outputs are what `Tensor.to` would have made there
  const uint32_t generation_;  // fork generation of the process that made the handle
  // Shared with each thread that is building the result: a key's hash may let another thread in,
  // which may finish first and reset this pointer.
  std::shared_ptr<TreeSpec> spec_;
  LeafCounts counts_;
  const bool timed_ = are_phases_timed();
  PhaseTimes phases_;                           // of the caller's threads; the jobs have their own
  std::vector<std::shared_ptr<CopyJob>> jobs_;  // empty if the engine itself moves nothing
  bool background_ = false;
  std::vector<CapturedRows> captured_;  // then there is nothing else, and the caller has the result
  std::vector<DelegatedOutputs> delegated_;  // by target
  pybind11::object python_failure_;          // raised by a delegated leaf or a container
  pybind11::object failure_traceback_;       // its traceback at that time
  // The device's error, or the error that prevented a job from being made.
  std::exception_ptr device_failure_;
  FallbackCount fallbacks_ = 0;
  bool is_known_done_ = false;  // the host has seen the end of all work
  pybind11::object owner_of_kept_;
  KeptOutputs* kept_ = nullptr;  // null: no tensor is reused
  pybind11::object result_;
};

}  // namespace tdcopier
