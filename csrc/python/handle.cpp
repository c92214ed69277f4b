// Hand-over: get() waits on the host, wait() makes a stream wait; both build the result once.
#include "python/handle.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "base/fork.h"
#include "base/internal_error.h"
#include "engine/graph_capture.h"
#include "python/device_argument.h"
#include "python/sources.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// The storages behind a delegated output, sparse ones included.
void record_on_stream(const at::Tensor& tensor, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl backend(stream.device_type());
  const auto record = [&](const at::Tensor& part) {
    if (part.has_storage()) backend.recordDataPtrOnStream(part.storage().data_ptr(), stream);
  };
  switch (tensor.layout()) {
    case c10::kSparse:
      record(tensor._indices());
      record(tensor._values());
      return;
    case c10::kSparseCsr:
    case c10::kSparseBsr:
      record(tensor.crow_indices());
      record(tensor.col_indices());
      record(tensor.values());
      return;
    case c10::kSparseCsc:
    case c10::kSparseBsc:
      record(tensor.ccol_indices());
      record(tensor.row_indices());
      record(tensor.values());
      return;
    default:
      record(tensor);
  }
}

}  // namespace

Handle::Handle(c10::Device target, TreeSpec spec, LeafCounts counts)
    : target_(target),
      inference_mode_(c10::InferenceMode::is_enabled()),
      generation_(fork_generation()),
      spec_(std::make_shared<TreeSpec>(std::move(spec))),
      counts_(counts) {}

Handle::~Handle() {
  if (generation_ != fork_generation()) {
    // A parent's thread may have held a lock that dropping these takes: the child leaves them be.
    new std::shared_ptr<CopyJob>(std::move(job_));
    new DelegatedOutputs(std::move(delegated_));
  }
  job_.reset();
  release_returned_sources();
}

void Handle::attach(std::shared_ptr<CopyJob> job, bool background) {
  counts_.packed = job->plan().packed_leaves;
  counts_.alone = static_cast<uint32_t>(job->plan().order.size()) - counts_.packed;
  job_ = std::move(job);
  background_ = background;
}

void Handle::build_early() {
  if (python_failure_ || (job_ && (!job_->is_enqueued() || job_->has_failed()))) return;
  build_once();
}

bool Handle::ready() {
  release_returned_sources();
  if (python_failure_) return true;
  if (job_ && !job_->is_done()) return false;
  const RelaxedCapture relaxed(target_.type());
  try {
    return !delegated_.made || delegated_.made->query();
  } catch (const c10::Error&) {
    return true;  // the device failed: get() will say how
  }
}

py::object Handle::get() {
  if (!has_engine_transfers(target_)) {
    raise_if_failed();
    build_once();
    return result_;
  }
  const c10::Stream stream = parse_stream(py::none(), target_);
  refuse_capture(stream, "get()");
  wait_enqueued();
  raise_if_failed();
  build_once();  // while the transfers run
  wait_done();
  hand_over_to(stream);
  return result_;
}

py::object Handle::wait(py::handle stream_or_none) {
  if (!has_engine_transfers(target_)) {
    check_is_stream(stream_or_none, target_);
    return get();  // the host has waited, so any stream has
  }
  const c10::Stream stream = parse_stream(stream_or_none, target_);
  refuse_capture(stream, "wait()");
  wait_enqueued();
  raise_if_failed();
  hand_over_to(stream);
  build_once();
  return result_;
}

void Handle::wait_enqueued() {
  if (job_ && !job_->is_enqueued()) {
    const py::gil_scoped_release no_gil;
    job_->wait_enqueued();
  }
  release_returned_sources();
}

void Handle::wait_done() {
  if (ready()) {
    // A device error ends a copy too; waiting for what has ended raises it without blocking.
    synchronize();
    return;
  }
  const py::gil_scoped_release no_gil;
  synchronize();
}

void Handle::synchronize() {
  if (job_) job_->wait_done();
  const RelaxedCapture relaxed(target_.type());
  if (delegated_.made) delegated_.made->synchronize();
}

void Handle::raise_if_failed() {
  if (python_failure_) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(python_failure_.ptr())),
                    python_failure_.ptr());
    throw py::error_already_set();
  }
  if (job_) job_->rethrow_failure();
}

void Handle::build_once() {
  if (result_) return;
  const std::shared_ptr<const TreeSpec> spec = spec_;
  check_invariant(spec != nullptr, "a handle has its spec until it has its result");
  const c10::InferenceMode mode(inference_mode_);
  py::object built = spec->unflatten([this](uint32_t leaf) { return job_->output(leaf); });
  // Keys' hashes may run Python code, so another thread may have been faster: its result stands.
  if (result_) return;
  result_ = std::move(built);
  spec_.reset();
}

void Handle::hand_over_to(const c10::Stream& stream) {
  if (job_) job_->hand_over_to(stream);
  if (!delegated_.made || stream == *delegated_.stream) return;
  delegated_.made->block(stream);
  for (const at::Tensor& tensor : delegated_.tensors) record_on_stream(tensor, stream);
}

py::tuple Handle::stats() const {
  const TransferCounts moved = job_ ? job_->counts() : TransferCounts{0, 0};
  const size_t chunks = job_ ? job_->plan().chunks.size() : 0;
  return py::make_tuple(counts_.packed, counts_.alone, counts_.delegated, counts_.reused,
                        counts_.opaque, chunks, moved.transfers, moved.bytes, background_);
}

int Handle::traverse(visitproc visit, void* arg) const {
  Py_VISIT(result_.ptr());
  Py_VISIT(python_failure_.ptr());
  return spec_ ? spec_->traverse(visit, arg) : 0;
}

void Handle::clear() {
  result_ = py::object();
  python_failure_ = py::object();
  spec_.reset();
}

}  // namespace tdcopier
