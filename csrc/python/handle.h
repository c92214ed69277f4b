// What the caller holds: the treespec, the job, and the result once it was built.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <vector>

#include "engine/copy_job.h"
#include "python/delegated.h"
#include "python/kept_outputs.h"
#include "python/sources.h"
#include "python/tree.h"

namespace tdcopier {

struct LeafCounts {
  uint32_t packed = 0;
  uint32_t alone = 0;
  uint32_t delegated = 0;
  uint32_t reused = 0;
  uint32_t opaque = 0;
  uint32_t left = 0;  // tables whose rows were read by their own code
};

// GIL: held for every member; given up inside while waiting. Thread: any that holds the GIL.
class Handle {
 public:
  Handle(c10::Device target, TreeSpec spec, LeafCounts counts);
  // Of a copy into `result`, whose leaves that are written lie on these devices.
  Handle(std::vector<c10::Device> targets, pybind11::object result, LeafCounts counts);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Filled in by start_copy, before the caller sees the handle.
  // The jobs of the tree's groups, in their order.
  void attach(std::shared_ptr<CopyJob> job, bool background);
  void attach(DelegatedOutputs delegated) { delegated_.push_back(std::move(delegated)); }
  void fail_with(pybind11::object exception);
  void fail_with(std::exception_ptr failure) { device_failure_ = std::move(failure); }
  // Where the result's tensors are taken from, and left for the next one. `owner` keeps it.
  void reuse_outputs(pybind11::object owner, KeptOutputs& kept) {
    owner_of_kept_ = std::move(owner);
    kept_ = &kept;
  }
  TreeSpec& spec() { return *spec_; }
  LeafCounts& counts() { return counts_; }
  PhaseTimes& phases() { return phases_; }

  // Builds the result if every job is enqueued and none has failed: while the transfer runs rather
  // than at the hand-over. What a container's own code raises is kept for get() and wait().
  void build_early();

  bool ready();
  pybind11::object get();
  pybind11::object wait(pybind11::handle stream);
  void wait_staged();
  // Of a copy that is held: sends it, if that is all there is to do. Returns whether nothing of it
  // is held any more. Returns at once.
  bool send_if_staged();
  pybind11::tuple stats() const;  // in the order of CopyStats' fields

  // Blocks: until nothing of it is written any more. Cannot be interrupted.
  void wait_stopped();

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  bool is_enqueued() const;
  bool has_failed() const;       // Requires: is_enqueued()
  void refuse_in_child() const;  // whose parent's threads work on it
  // Takes part in the jobs, or in those with sources on the host. GIL: must not be held.
  void help(bool host_sources_only) const;
  void wait_enqueued();
  void wait_done(bool on_host_only);
  // Until every host source was read, by whoever reads it: its memory is the caller's again.
  void wait_host_sources_read();
  // The current streams of the devices of sources that the engine reads.
  std::vector<c10::Stream> producers(const char* call) const;
  void order_behind_reads(const std::vector<c10::Stream>& producers);
  void wait_stopped_if_failed();  // of a copy into memory that exists
  // Blocks: until all is done, or what arrives on the host. GIL: either way. The device's first
  // error. Throws: Interrupted.
  std::exception_ptr synchronize(bool on_host_only = false) const;
  // One for each target that has streams: the one that is given, or that is current.
  std::vector<c10::Stream> consumers(pybind11::handle stream, const char* call) const;
  void release_kept();
  void raise_if_failed();
  void build_once();
  void forget_kept();
  pybind11::object times() const;  // microseconds by step; None where they were not taken
  void hand_over_to(const std::vector<c10::Stream>& streams);

  const std::vector<c10::Device> targets_;
  const bool fills_;           // memory that exists
  const bool inference_mode_;  // at the call: outputs are what `Tensor.to` would have made there
  const uint32_t generation_;  // of the process that made it
  // Shared with whoever is building the result: a key's hash may let another thread in, which then
  // builds too, is faster, and lets go of the spec.
  std::shared_ptr<TreeSpec> spec_;
  LeafCounts counts_;
  const bool timed_ = are_phases_timed();
  PhaseTimes phases_;  // those of the caller's threads; the jobs have their own
  std::vector<std::shared_ptr<CopyJob>> jobs_;  // none: the engine itself moves nothing
  bool background_ = false;
  std::vector<DelegatedOutputs> delegated_;  // by target
  pybind11::object python_failure_;          // what a delegated leaf or a container raised
  pybind11::object failure_traceback_;       // as it was then
  // What the device said of this copy when it was asked, or what kept a job from being made.
  std::exception_ptr device_failure_;
  pybind11::object owner_of_kept_;
  KeptOutputs* kept_ = nullptr;  // null: every tensor is made anew
  pybind11::object result_;
};

}  // namespace tdcopier
