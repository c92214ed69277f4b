// One call: device, capture check, walk, run-ahead bound, plan, stage and transfer, delegated
// leaves.
#include "python/start_copy.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>
#include <utility>

#include "base/thread_pool.h"
#include "python/array_leaf.h"
#include "python/device_argument.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Made at first use and never destroyed. A forked child has none of the threads and makes its own.
ThreadPool* g_workers = nullptr;
std::mutex g_workers_mutex;

ThreadPool& workers() {
  const std::lock_guard lock(g_workers_mutex);
  if (g_workers == nullptr) {
    static const int registered =
        pthread_atfork([] { g_workers_mutex.lock(); }, [] { g_workers_mutex.unlock(); },
                       [] {
                         g_workers = nullptr;
                         g_workers_mutex.unlock();
                       });
    (void)registered;
    g_workers = new ThreadPool(default_worker_count());
  }
  return *g_workers;
}

// Whatever way the call ends: what it gave back is not left lying until the next one.
struct ReleaseAtEnd {
  ~ReleaseAtEnd() { release_returned_sources(); }
};

// Starts the job where it is best run. Returns whether workers run it.
bool launch(const std::shared_ptr<CopyJob>& job, TargetDevice& target, const CopyOptions& options) {
  // Small work is done here, unless it would have to wait for staging or for a pageable transfer.
  const bool at_once = options.use_pinned_staging && job->plan().total_bytes <= kMaxInlineBytes &&
                       !target.staging().is_exhausted();
  if (options.use_background_thread && !at_once && job->run_in_background(workers())) return true;
  const py::gil_scoped_release no_gil;
  job->run();
  return false;
}

// Those that own the memory: a wrapper subclass keeps its own in tensors of its attributes.
void add_plain_parts(const py::object& moved, std::vector<at::Tensor>& parts) {
  if (!THPVariable_Check(moved.ptr())) return;
  if (THPVariable_CheckExact(moved.ptr())) {
    parts.push_back(THPVariable_Unpack(moved.ptr()));
    return;
  }
  const py::list found = py::module_::import("tdcopier._delegated").attr("plain_parts")(moved);
  for (const py::handle part : found) parts.push_back(THPVariable_Unpack(part.ptr()));
}

// `Tensor.to` for each leaf that the engine leaves to it, in this thread and under its state.
void run_delegated(Handle& handle, const std::vector<size_t>& delegated, c10::Device target) {
  const py::object device = py::reinterpret_steal<py::object>(THPDevice_New(target));
  const py::object to_name = py::str("to");
  DelegatedOutputs outputs;
  try {
    for (const size_t index : delegated) {
      const auto source = py::reinterpret_borrow<py::object>(handle.spec().value(index));
      py::object tensor = source;
      if (classify_array(source.ptr()) != ArrayKind::kNotAnArray) {
        tensor = py::module_::import("tdcopier._arrays").attr("as_tensor")(source);
      }
      py::object moved = tensor.attr(to_name)(device);
      if (moved.is(source) || (moved.is(tensor) && target.is_cpu())) {
        ++handle.counts().reused;
      } else {
        ++handle.counts().delegated;
        add_plain_parts(moved, outputs.tensors);
      }
      handle.spec().replace_value(index, std::move(moved));
    }
    if (!outputs.tensors.empty() && has_engine_transfers(target)) {
      outputs.stream = parse_stream(py::none(), target);
      outputs.made = TargetDevice::of(target).events().record(*outputs.stream);
    }
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // an interrupt is not the copy's failure
    handle.fail_with(error.value());
    return;
  }
  handle.attach(std::move(outputs));
}

}  // namespace

std::unique_ptr<Handle> start_copy(py::handle data, py::handle device, const CopyOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  const c10::Device target = parse_device(device);
  const bool engine_transfers = has_engine_transfers(target);
  if (engine_transfers) refuse_capture(parse_stream(py::none(), target), "start_copy()");

  FlatTree flat = flatten(data.ptr(), target, engine_transfers);
  LeafCounts counts;
  counts.reused = flat.reused;
  counts.opaque = flat.opaque;
  auto handle = std::make_unique<Handle>(target, std::move(flat.spec), counts);

  if (flat.leaves.size() != 0) {
    TargetDevice& target_device = TargetDevice::of(target);
    if (!target_device.run_ahead().has_room()) {
      const py::gil_scoped_release no_gil;
      target_device.run_ahead().wait_for_room();
    }
    PackPlan plan = make_pack_plan(flat.leaves.extents(), options.pack);
    auto job = std::make_shared<CopyJob>(target_device, std::move(flat.leaves), std::move(plan),
                                         options.use_pinned_staging, std::move(flat.sources));
    const bool background = launch(job, target_device, options);
    handle->attach(std::move(job), background);
  }
  if (!flat.delegated.empty()) run_delegated(*handle, flat.delegated, target);
  handle->build_early();
  return handle;
}

void shut_down_workers() {
  const py::gil_scoped_release no_gil;
  ThreadPool* workers = nullptr;
  {
    const std::lock_guard lock(g_workers_mutex);
    workers = g_workers;
  }
  if (workers != nullptr) workers->shut_down();
}

}  // namespace tdcopier
