// Implements the hand-over: get() waits on the host, wait() makes a stream wait, and both build the
// result once.
#include "python/handle/handle.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/forks.h"
#include "base/interleaver.h"
#include "base/internal_error.h"
#include "engine/device/graph_capture.h"
#include "python/handle/outputs.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/interrupts.h"
#include "python/walk/sources.h"

namespace py = pybind11;

namespace tdcopier {

Handle::Handle(c10::Device target, TreeSpec spec, LeafCounts counts)
    : targets_{target},
      fills_(false),
      inference_mode_(c10::InferenceMode::is_enabled()),
      generation_(fork_generation()),
      spec_(std::make_shared<TreeSpec>(std::move(spec))),
      counts_(counts) {}

Handle::Handle(std::vector<c10::Device> targets, py::object result, LeafCounts counts)
    : targets_(std::move(targets)),
      fills_(true),
      inference_mode_(c10::InferenceMode::is_enabled()),
      generation_(fork_generation()),
      counts_(counts),
      result_(std::move(result)) {}

Handle::~Handle() {
  if (is_of_parent()) {
    // Leaks these in a forked child: their destructors may need a lock that a thread of the parent
    // held during the fork.
    new std::vector<std::shared_ptr<CopyJob>>(std::move(jobs_));
    new std::vector<DelegatedOutputs>(std::move(delegated_));
    new std::vector<CapturedRows>(std::move(captured_));
  }
  for (const auto& job : jobs_) job->drop_result();
  jobs_.clear();
  release_returned_sources();
}

bool Handle::is_of_parent() const {
  return generation_ != fork_generation();
}

void Handle::attach(std::shared_ptr<CopyJob> job, bool background) {
  counts_.packed += job->plan().packed_leaves;
  counts_.alone += static_cast<uint32_t>(job->plan().order.size()) - job->plan().packed_leaves;
  counts_.rows_in_place += job->rows_in_place();
  jobs_.push_back(std::move(job));
  background_ |= background;
}

bool Handle::is_enqueued() const {
  return std::all_of(jobs_.begin(), jobs_.end(),
                     [](const auto& job) { return job->is_enqueued(); });
}

bool Handle::has_failed() const {
  return std::any_of(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->has_failed(); });
}

void Handle::fail_with(py::object exception) {
  failure_traceback_ = exception.attr("__traceback__");
  python_failure_ = std::move(exception);
}

void Handle::build_early() {
  if (python_failure_ || device_failure_ || !is_enqueued() || has_failed()) return;
  build_unless_refused();
}

// Workers fill the memory meanwhile, which takes about as long: the caller would do less by helping
// them. If they fail, wait_stopped_if_failed() drops the tree.
void Handle::build_while_staged() {
  if (is_of_parent() || python_failure_ || device_failure_) return;
  const auto is_staged = [](const auto& job) {
    return job->is_enqueued() || !job->result() || job->target().is_cpu() ||
           job->are_sources_known_free();
  };
  if (!std::ranges::all_of(jobs_, is_staged)) build_unless_refused();
}

void Handle::build_unless_refused() {
  try {
    build_once();
  } catch (py::error_already_set&) {
    if (!python_failure_) throw;
  }
}

bool Handle::ready() {
  if (interleaver() != nullptr) {
    // A thread that polls holds the GIL except when the interpreter makes it yield, as here.
    const WithoutGil no_gil;
    interleave();
  }
  if (is_of_parent()) return !is_unknown_in_child();
  Reclaimer::get().look();
  release_returned_sources();
  // Even after a failure, the sources of a job that is still running must not be modified.
  for (const auto& job : jobs_) {
    if (!job->is_done()) return false;
  }
  if (python_failure_) return true;
  for (const DelegatedOutputs& delegated : delegated_) {
    if (!delegated.is_done()) return false;
  }
  is_known_done_ = true;
  release_kept();
  return true;
}

std::string Handle::described() {
  const uint32_t leaves = counts_.packed + counts_.alone + counts_.delegated + counts_.reused;
  std::string text = "<tdcopier.AsyncCopyHandle:";
  // Leaves for which there was no memory were never counted.
  const bool is_without_job = jobs_.empty() && (python_failure_ || device_failure_);
  if (!is_without_job) text += " " + std::to_string(leaves) + (leaves == 1 ? " leaf" : " leaves");
  for (const c10::Device target : targets_) {
    text += (target == targets_.front() ? " to " : ", ") + target.str();
  }
  if (!ready()) return text + ", on the way>";
  return text + (python_failure_ || device_failure_ || has_failed() ? ", failed>" : ", arrived>");
}

std::vector<c10::Stream> Handle::consumers(py::handle given) const {
  std::vector<c10::Device> devices;
  for (const c10::Device target : targets_) {
    if (has_engine_transfers(target)) devices.push_back(target);
  }
  std::vector<c10::Stream> streams;
  for (const c10::Device device : devices) streams.push_back(parse_stream(py::none(), device));
  if (!given.is_none() && !devices.empty()) {
    const c10::Device named = device_of_stream(given).value_or(devices.front());
    const auto at = std::find(devices.begin(), devices.end(), named);
    const auto which = at != devices.end() ? at - devices.begin() : 0;
    streams[which] = parse_stream(given, devices[which]);
  }
  for (const c10::Stream& stream : streams) refuse_capture(stream);
  return streams;
}

void Handle::check_numbers() const {
  for (const auto& job : jobs_) job->check_numbers();
  for (const CapturedRows& captured : captured_) {
    if (captured.watch) captured.watch->raise_if_bad();
  }
}

// The graph's own stream orders what is captured after the call. Requires: captured_ is not empty.
py::object Handle::result_of_capture(py::handle given) {
  raise_if_failed();
  check_numbers();
  for (const c10::Device target : targets_) {
    if (given.is_none() || !has_engine_transfers(target)) continue;
    if (parse_stream(given, target) == parse_stream(py::none(), target)) continue;
    throw py::value_error(
        "rows that are captured in a graph are handed over to the stream that is "
        "capturing: leave `stream` out");
  }
  return result_;
}

py::object Handle::get() {
  if (!captured_.empty()) return result_of_capture(py::none());
  if (jobs_.empty()) raise_if_failed();  // a failed capture, for example
  const std::vector<c10::Stream> streams = consumers(py::none());
  build_while_staged();
  wait_enqueued();
  wait_stopped_if_failed();
  raise_if_failed();
  build_once();  // while the transfers run
  wait_done(/*on_host_only=*/false);
  hand_over_to(streams);
  return result_;
}

py::object Handle::order(py::handle stream_or_none, bool for_reads) {
  if (!captured_.empty()) return result_of_capture(stream_or_none);
  if (jobs_.empty()) raise_if_failed();
  const std::vector<c10::Stream> streams = consumers(stream_or_none);
  if (streams.empty()) {
    check_is_stream(stream_or_none, targets_.empty() ? c10::Device(c10::kCPU) : targets_.front());
    return get();  // the host has waited, so any stream has
  }
  const std::vector<c10::Stream> producing = producers();
  build_while_staged();
  wait_enqueued();
  wait_stopped_if_failed();
  raise_if_failed();
  build_once();  // while the transfers run
  if (for_reads) wait_host_sources_read();
  if (std::ranges::any_of(targets_, &c10::Device::is_cpu)) wait_done(/*on_host_only=*/true);
  hand_over_to(streams);
  order_after_reads(producing);
  return result_;
}

py::object Handle::enqueued() {
  wait_enqueued();
  wait_stopped_if_failed();
  raise_if_failed();
  build_once();
  return result_;
}

std::unique_ptr<DeviceAccess> Handle::device_access() {
  wait_enqueued();
  wait_stopped_if_failed();
  raise_if_failed();
  std::vector<EventRef> ends;
  c10::Device device = c10::kCPU;
  if (is_of_parent()) return std::make_unique<DeviceAccess>(device, std::move(ends));
  for (const auto& job : jobs_) {
    if (job->target().is_cpu() && job->rows_in_place() == 0) {
      const WaitWithoutGil waiting;
      job->wait_done();
    }
    if (!job->last_access()) continue;
    ends.push_back(job->last_access());
    device = job->target().is_cpu() ? job->source_device() : job->target();
  }
  return std::make_unique<DeviceAccess>(device, std::move(ends));
}

// Returns the streams in the order of the jobs whose sources are on a device.
std::vector<c10::Stream> Handle::producers() const {
  std::vector<c10::Stream> streams;
  for (const auto& job : jobs_) {
    if (job->source_device().is_cpu()) continue;
    streams.push_back(parse_stream(py::none(), job->source_device()));
    refuse_capture(streams.back());
  }
  return streams;
}

void Handle::order_after_reads(const std::vector<c10::Stream>& producers) {
  if (is_of_parent()) return;
  size_t next = 0;
  for (const auto& job : jobs_) {
    if (!job->source_device().is_cpu()) job->order_after_reads(producers[next++]);
  }
  for (const DelegatedOutputs& delegated : delegated_) delegated.order_after_reads();
}

void Handle::wait_staged() {
  const std::vector<c10::Stream> producing = producers();
  if (is_of_parent()) {
    const auto is_free = [](const auto& job) { return job->are_sources_known_free(); };
    if (!std::ranges::all_of(jobs_, is_free)) refuse_in_child();
  } else if (!std::ranges::all_of(jobs_, [](const auto& job) { return job->are_sources_free(); })) {
    const WaitWithoutGil waiting;
    // Jobs with device sources may have to wait for the device after their reads.
    help(/*host_sources_only=*/true);
    for (const auto& job : jobs_) job->wait_sources_free();
  }
  check_numbers();
  release_returned_sources();
  order_after_reads(producing);
}

bool Handle::send_if_staged() {
  for (const auto& job : jobs_) job->send();
  return is_enqueued();
}

bool Handle::is_wait_instant() {
  if (std::ranges::any_of(targets_, &c10::Device::is_cpu)) return ready();
  if (!send_if_staged()) return false;
  if (fills_ && (python_failure_ || device_failure_ || has_failed())) return ready();
  return std::ranges::all_of(jobs_, [](const auto& job) {
    return !job->waits_hold_for_reads() || job->are_sources_free();
  });
}

// Skips jobs that failed: the device may still be reading their sources.
void Handle::release_kept() {
  for (const auto& job : jobs_) {
    if (!job->has_failed()) job->release_kept();
  }
  release_returned_sources();
}

void Handle::raise_if_failed() {
  if (python_failure_) {
    // Restores the original traceback: each raise would extend it, and keep its frames' objects
    // alive.
    PyException_SetTraceback(python_failure_.ptr(), failure_traceback_.ptr());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(python_failure_.ptr())),
                    python_failure_.ptr());
    throw py::error_already_set();
  }
  for (const auto& job : jobs_) job->rethrow_failure();
  if (device_failure_) std::rethrow_exception(device_failure_);
}

void Handle::build_once() {
  if (result_) return;
  const std::shared_ptr<const TreeSpec> spec = spec_;
  check_invariant(spec != nullptr, "a handle has its spec until it has its result");
  const c10::InferenceMode mode(inference_mode_);
  py::object built;
  try {
    Outputs outputs(jobs_, kept_ != nullptr ? kept_->pick(inference_mode_) : nullptr,
                    !is_of_parent());
    {
      const PhaseRange range(phases_, Phase::kUnflatten);
      built = spec->unflatten(outputs);
    }
    phases_.add(Phase::kOutputs, outputs.ns());  // a phase of its own, nested in kUnflatten
    phases_.take_out(Phase::kUnflatten, outputs.ns());
  } catch (py::error_already_set& error) {
    if (result_) return;
    // An interrupt is not a failure of the copy: the next call builds again.
    if (error.matches(PyExc_Exception)) fail_with(error.value());
    throw;
  }
  // Keys and containers may run Python code, so another thread may have finished first. Then its
  // result is used.
  if (result_) return;
  result_ = std::move(built);
  spec_.reset();
  forget_kept();
}

void Handle::forget_kept() {
  kept_ = nullptr;
  const py::object owner = std::exchange(owner_of_kept_, {});
}

void Handle::hand_over_to(const std::vector<c10::Stream>& streams) {
  if (is_of_parent()) return;
  for (const c10::Stream& stream : streams) {
    for (const auto& job : jobs_) {
      if (job->target() == stream.device()) job->hand_over_to(stream);
    }
    for (const DelegatedOutputs& delegated : delegated_) delegated.hand_over_to(stream);
  }
}

py::tuple Handle::stats() const {
  TransferCounts moved{0, 0, counts_.left};
  moved.fallbacks += fallbacks_;
  size_t chunks = 0;
  for (const auto& job : jobs_) {
    moved.transfers += job->counts().transfers;
    moved.bytes += job->counts().bytes;
    moved.fallbacks += job->counts().fallbacks;
    chunks += job->chunks();
  }
  return py::make_tuple(counts_.packed, counts_.alone, counts_.delegated, counts_.reused,
                        counts_.opaque, chunks, moved.transfers, moved.bytes, background_,
                        moved.fallbacks, counts_.opaque_differences, counts_.rows_in_place,
                        times());
}

py::object Handle::times() const {
  if (!timed_) return py::none();
  py::tuple times(kPhases);
  for (size_t i = 0; i < kPhases; ++i) {
    const auto phase = static_cast<Phase>(i);
    uint64_t ns = phases_.ns(phase);
    for (const auto& job : jobs_) ns += job->phases().ns(phase);
    times[i] = static_cast<double>(ns) / 1000;
  }
  return times;
}

int Handle::traverse(visitproc visit, void* arg) const {
  Py_VISIT(result_.ptr());
  Py_VISIT(python_failure_.ptr());
  Py_VISIT(failure_traceback_.ptr());
  Py_VISIT(owner_of_kept_.ptr());
  return spec_ ? spec_->traverse(visit, arg) : 0;
}

void Handle::clear() {
  result_ = py::object();
  python_failure_ = py::object();
  failure_traceback_ = py::object();
  spec_.reset();
  forget_kept();
}

}  // namespace tdcopier
