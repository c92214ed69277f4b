// Makes the host wait until the jobs of a copy have read their sources, enqueued their transfers,
// or ended; this thread helps them first. handle.cpp raises what has failed, and orders streams.
#include <algorithm>
#include <exception>
#include <stdexcept>

#include "engine/device/phases.h"
#include "engine/leaves/leaf.h"
#include "python/handle/handle.h"
#include "python/runtime/interrupts.h"

namespace tdcopier {

void Handle::wait_host_sources_read() {
  if (is_of_parent()) return;  // it is done
  const auto is_read = [](const auto& job) {
    return !job->source_device().is_cpu() || !job->waits_hold_for_reads() ||
           job->are_sources_free();
  };
  if (std::all_of(jobs_.begin(), jobs_.end(), is_read)) return;
  const PhaseRange range(phases_, Phase::kWait);
  const WaitWithoutGil waiting;
  for (const auto& job : jobs_) {
    if (!is_read(job)) job->wait_sources_free();
  }
}

void Handle::refuse_in_child() const {
  if (!is_of_parent()) return;
  throw std::runtime_error(
      "this copy was started before the process was forked, and the threads that work on it are "
      "the parent's: get its result there, or start another copy here");
}

// This thread can begin sooner than a sleeping worker can wake up.
void Handle::help(bool host_sources_only) const {
  if (dispatch_is_altered()) return;  // a torch mode of this thread must not affect the copy
  for (const auto& job : jobs_) {
    if (!host_sources_only || job->source_device().is_cpu()) job->help();
  }
}

void Handle::wait_enqueued() {
  if (is_unknown_in_child()) refuse_in_child();
  if (!is_enqueued()) {
    const PhaseRange range(phases_, Phase::kWait);
    const WaitWithoutGil waiting;
    help(/*host_sources_only=*/false);
    for (const auto& job : jobs_) job->wait_enqueued();
  }
  release_returned_sources();
}

void Handle::wait_stopped() {
  try {
    const WaitWithoutGil waiting;
    synchronize();
  } catch (const Interrupted&) {  // a second signal: the caller does not want to wait for this
  }
}

// Once a failure is reported, the caller may write to the destinations or start another copy into
// them.
void Handle::wait_stopped_if_failed() {
  if (!fills_ && !is_of_parent() && result_ && has_failed()) result_ = pybind11::object();
  if (!fills_ || is_of_parent() || (!python_failure_ && !device_failure_ && !has_failed())) return;
  const WaitWithoutGil waiting;
  synchronize();  // ignores the device's error: the first failure is raised
}

bool Handle::is_unknown_in_child() const {
  if (!is_of_parent() || is_known_done_) return false;
  const auto is_known = [](const auto& job) {
    return job->is_known_done() || (job->is_enqueued() && job->has_failed());
  };
  const auto is_in_flight = [](const DelegatedOutputs& each) { return each.made != nullptr; };
  return !std::ranges::all_of(jobs_, is_known) || std::ranges::any_of(delegated_, is_in_flight);
}

void Handle::wait_done(bool on_host_only) {
  if (is_of_parent()) return raise_if_failed();  // wait_enqueued() has checked that it is done
  const PhaseRange range(phases_, Phase::kWait);
  std::exception_ptr failure;
  if (!on_host_only && ready()) {
    // A device error ends a copy too; this call returns it without blocking.
    failure = synchronize();
  } else {
    const WaitWithoutGil waiting;
    failure = synchronize(on_host_only);
    if (failure && on_host_only) synchronize();  // as wait_stopped_if_failed()
  }
  // A device may report its error only once.
  if (!device_failure_) device_failure_ = failure;
  is_known_done_ |= !on_host_only;
  raise_if_failed();
  if (!on_host_only) release_kept();
}

std::exception_ptr Handle::synchronize(bool on_host_only) const {
  std::exception_ptr failure;
  const auto end = [&failure](auto& part) {
    try {
      part.wait_done();
    } catch (const Interrupted&) {
      throw;
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  for (const auto& job : jobs_) {
    if (!on_host_only || job->target().is_cpu()) end(*job);
  }
  if (!on_host_only) {
    for (const DelegatedOutputs& delegated : delegated_) end(delegated);
  }
  return failure;
}

}  // namespace tdcopier
