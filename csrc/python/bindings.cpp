// Defines the native module, and binds copies, trees and controls: names and argument conversion;
// no logic. bindings_of_memory.cpp binds memory, bindings_of_testing.cpp what only tests use.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/Device.h>
#include <torch/csrc/Stream.h>

#include <utility>

#include "base/forks.h"
#include "base/internal_error.h"
#include "engine/device/bad_rows.h"
#include "engine/device/phases.h"
#include "engine/device/run_ahead.h"
#include "engine/device/staging_ring.h"
#include "engine/device/thread_pools.h"
#include "engine/jobs/route.h"
#include "engine/moves/row_kernel.h"
#include "engine/moves/segment_kernel.h"
#include "python/bindings.h"
#include "python/calls/copy_into.h"
#include "python/calls/explain.h"
#include "python/calls/prepared_copy.h"
#include "python/calls/start_copy.h"
#include "python/handle/device_access.h"
#include "python/handle/handle.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/guarded.h"
#include "python/runtime/hooks.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_state.h"
#include "python/runtime/torch_version.h"
#include "python/walk/flatten.h"
#include "python/walk/known_layouts.h"
#include "python/walk/pair_walk.h"
#include "python/walk/path.h"
#include "python/walk/row_leaves.h"
#include "python/walk/sources.h"
#include "python/walk/value_kind.h"

namespace {

using tdcopier::CopyOptions;
using tdcopier::DeviceAccess;
using tdcopier::guarded;
using tdcopier::Handle;
using tdcopier::of_device;
using tdcopier::OnUnknown;
using tdcopier::PathStep;
using tdcopier::PreparedCopy;
using tdcopier::Reason;
using tdcopier::Sending;
using tdcopier::WhyDelegated;
using tdcopier::with_torch_errors;
using tdcopier::WithoutGil;

// Makes the class visible to Python's garbage collector: its members may refer back to it.
template <typename Held>
void make_collectable(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<Held&>(py::handle(self)).traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<Held&>(py::handle(self)).clear();
    return 0;
  };
}

// Handles come from calls only. Without a constructor, `__new__` would give one without a C++
// object.
void make_handle_type(PyHeapTypeObject* heap_type) {
  make_collectable<Handle>(heap_type);
  heap_type->ht_type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  heap_type->ht_type.tp_new = nullptr;
}

py::list pairs_with_paths(py::handle source, py::handle destination, const std::string& source_name,
                          const std::string& destination_name) {
  return tdcopier::pairs_with_paths(source, destination,
                                    {source_name.c_str(), destination_name.c_str()});
}

py::list tables_with_paths(py::handle storage, py::handle rows, py::handle readers,
                           py::handle device) {
  tdcopier::RowRequest request = tdcopier::row_request_of(rows);
  tdcopier::add_readers(request, readers);
  tdcopier::RowLeaves leaves(std::move(request));
  return tdcopier::tables_with_paths(storage, tdcopier::parse_device(device), leaves);
}

py::object copy_stream(py::handle device, const std::string& which) {
  const c10::Device target = tdcopier::parse_device(device);
  if (!tdcopier::has_engine_transfers(target)) {
    throw py::value_error("no engine for " + target.str());
  }
  tdcopier::Accelerator& accelerator = tdcopier::Accelerator::of(target);
  const c10::Stream& stream = which == "to_device"     ? accelerator.to_device_stream()
                              : which == "from_device" ? accelerator.from_device_stream()
                                                       : accelerator.ordered_stream();
  return py::reinterpret_steal<py::object>(THPStream_Wrap(stream));
}

void bind_enums(py::module_& m) {
  py::native_enum<OnUnknown>(m, "OnUnknown", "enum.Enum")
      .value("REFUSE_ROOT", OnUnknown::kRefuseRoot)
      .value("IGNORE", OnUnknown::kIgnore)
      .value("WARN", OnUnknown::kWarn)
      .value("RAISE", OnUnknown::kRaise)
      .finalize();
  py::native_enum<Sending>(m, "Sending", "enum.Enum")
      .value("AT_ONCE", Sending::kAtOnce)
      .value("DEFERRED", Sending::kDeferred)
      .value("DEFERRED_ALONE", Sending::kDeferredAlone)
      .value("DEFERRED_STAGED", Sending::kDeferredStaged)
      .finalize();
  py::native_enum<PathStep::Kind>(m, "Step", "enum.Enum")
      .value("INDEX", PathStep::Kind::kIndex)
      .value("KEY", PathStep::Kind::kKey)
      .value("NESTED_KEY", PathStep::Kind::kNestedKey)
      .value("ATTRIBUTE", PathStep::Kind::kAttribute)
      .finalize();
  py::native_enum<WhyDelegated>(m, "WhyDelegated", "enum.Enum")
      .value("CLASS", WhyDelegated::kClass)
      .value("OBJECT", WhyDelegated::kObject)
      .value("TORCH_MODE", WhyDelegated::kTorchMode)
      .value("DEVICE", WhyDelegated::kDevice)
      .value("NOT_PLAIN", WhyDelegated::kNotPlain)
      .finalize();
  py::native_enum<Reason>(m, "Reason", "enum.Enum")
      .value("PACKED", Reason::kPacked)
      .value("PACKED_BY_KERNEL", Reason::kPackedByKernel)
      .value("PACKING_IS_OFF", Reason::kPackingIsOff)
      .value("LARGE", Reason::kLarge)
      .value("LARGER_THAN_CHUNK", Reason::kLargerThanChunk)
      .value("CLASS", Reason::kClass)
      .value("OBJECT", Reason::kObject)
      .value("TORCH_MODE", Reason::kTorchMode)
      .value("DEVICE", Reason::kDevice)
      .value("OTHER_KEYS", Reason::kOtherKeys)
      .value("NAMED", Reason::kNamed)
      .value("NO_STORAGE", Reason::kNoStorage)
      .value("GRADIENT", Reason::kGradient)
      .value("FORWARD_GRADIENT", Reason::kForwardGradient)
      .value("TOO_LARGE", Reason::kTooLarge)
      .value("UNALIGNED", Reason::kUnaligned)
      .value("REUSED", Reason::kReused)
      .value("OPAQUE", Reason::kOpaque)
      .finalize();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  tdcopier::check_torch_version();
  tdcopier::watch_forks();
  tdcopier::note_main_thread();
  py::options docstrings;  // without the signatures that pybind11 knows: the stub has them
  docstrings.disable_function_signatures();
  m.def("set_hooks", &tdcopier::set_hooks);
  m.doc() = "The copy engine. Use the names of `tdcopier` itself.";

  py::object internal_error =
      py::register_exception<tdcopier::InternalError>(m, "InternalError", PyExc_RuntimeError);
  internal_error.attr("__module__") = "tdcopier";
  internal_error.attr("__doc__") = R"(
An invariant of the engine does not hold. This is a bug in tdcopier: please report it.

For example::

    try:
        batch = tdcopier.copy(batch, "cuda")
    except tdcopier.InternalError:
        print(tdcopier.info())  # for the report
        raise)";

  bind_enums(m);
  py::class_<Handle> handle(m, "AsyncCopyHandle", py::custom_type_setup(make_handle_type),
                            R"(
The handle of a copy, as `start_copy` and the other `start_` functions return it.

For example::

    handle = tdcopier.start_copy(batch, "cuda")
    following = next(batches)  # meanwhile
    loss = model(handle.wait())
    if handle.ready() and handle.stats.fallbacks:
        print(handle.stats)

You may drop it at any time: the copy goes on, and nothing blocks or leaks. Any thread may use it.
Its methods release the GIL while they wait.)");
  handle.attr("__module__") = "tdcopier";
  handle.attr("__class_getitem__") =
      py::module_::import("builtins")
          .attr("classmethod")(py::module_::import("types").attr("GenericAlias"));
  handle.def("__repr__", guarded(&Handle::described))
      .def("ready", guarded(&Handle::ready), R"(
Return whether the copy has ended, with a result or an error. Never blocks.)")
      .def("get", guarded(&Handle::get), R"(
Block until the copy has arrived, and return the result, the same object at each call.

The result is safe on the calling thread's current stream of the target device: its memory is not
reused while that stream can still read it. Another stream that reads it needs `wait(stream)`, a
`get()` while it is current, or `record_stream`.

Raises:
    Exception: the error of a copy that failed, for example `torch.OutOfMemoryError`; every time.
    RuntimeError: the current stream is capturing a CUDA graph.)")
      .def("wait", guarded(&Handle::wait), py::arg("stream") = py::none(), R"(
Make a stream wait for the copy, and return the result, the same object as `get()`.

Work that is enqueued on the stream after this call sees the result. The host blocks only until host
sources have been read, so you may then write to them, pinned ones included: until the last byte is
in a staging buffer, which is already so for small copies, or until the device has read large pinned
leaves in place. It does not wait for rows that an index on the device selects: for those there is
`wait_gathered`. The calling thread's current stream of each device with sources waits until they
have been read, so work that is enqueued there after this call may overwrite them. If the target is
the host, this is `get()`.

Args:
    stream: a `torch.Stream` of the target device; None means the calling thread's current one.

Raises:
    Exception: the error of a copy that is known to have failed; every time. If the device fails
        later, the stream does too.
    TypeError: `stream` is not a stream.
    ValueError: `stream` is on another device.
    RuntimeError: the stream, or the current stream of a source's device, is capturing a CUDA
        graph.)")
      .def("wait_staged", guarded(&Handle::wait_staged), R"(
Block until you may write to the sources again, which is before the copy is done.

When it returns, host sources have been read: they are in staging buffers, or the device has read
large pinned leaves in place. Sources on a device are read in the order of streams: it returns when
their reads are enqueued, and the calling thread's current stream of that device waits for them, so
work that is enqueued there after this call may overwrite them. A copy that has failed reads nothing
any more, and this returns: `get` and `wait` raise its error.

Raises:
    RuntimeError: a source is on a device whose current stream is capturing a CUDA graph.)")
      .def("wait_gathered", guarded(&Handle::wait_staged), R"(
Block until every row has been read: `wait_staged`, under the name that fits a gather.

Raises:
    IndexError: a row of an index on the device is out of range.)")
      .def(
          "__await__", [](const py::object& self) { return tdcopier::hooks().arrived(self); },
          R"(
Return what `get` returns, and let the asyncio event loop run until the copy has arrived.

No thread is used: the task asks `ready` and sleeps, 1 ms at first, then a tenth of the time waited so
far, at most 20 ms. The result is safe on the stream that is current when the task goes on. Any task
may await, several times. If a task is cancelled, the copy continues.

Raises:
    Exception: as `get`.
    RuntimeError: no event loop is running.)")
      .def("_enqueued", guarded(&Handle::enqueued))
      .def("_hand_over", guarded(&Handle::hand_over), py::arg("stream") = py::none())
      .def("_device_access", guarded(&Handle::device_access))
      .def("_send_if_staged", &Handle::send_if_staged)
      .def("_is_wait_instant", &Handle::is_wait_instant)
      .def("_refuse_in_child", &Handle::refuse_in_child)
      .def_property_readonly("_reuses_leaves",
                             [](Handle& self) { return self.counts().reused != 0; })
      .def_property_readonly(
          "stats", [](const Handle& self) { return tdcopier::hooks().stats_of(*self.stats()); },
          "Counts of this copy, a `CopyStats`; complete once `ready()` returns True.");

  py::class_<CopyOptions>(m, "CopyOptions")
      .def(py::init([](bool use_pinned_staging, bool pack_cpu_tensors,
                       uint64_t min_packed_alignment_bytes, uint64_t max_packed_chunk_bytes,
                       bool use_background_thread) {
        return CopyOptions{{use_pinned_staging,
                            {pack_cpu_tensors, min_packed_alignment_bytes, max_packed_chunk_bytes},
                            use_background_thread}};
      }))
      .def("with_on_unknown",
           [](CopyOptions options, OnUnknown on_unknown) {
             options.on_unknown = on_unknown;
             return options;
           })
      .def("with_sending",
           [](CopyOptions options, Sending sending, bool in_callers_order) {
             options.sending = tdcopier::usable(sending);
             options.in_callers_order = in_callers_order;
             return options;
           })
      .def("requiring_pinned_results",
           [](CopyOptions options) {
             options.requires_pinned_results = true;
             return options;
           })
      .def("reading_pinned_in_place", [](CopyOptions options) {
        options.reads_pinned_in_place = true;
        return options;
      });
  m.def("start_copy", guarded(&tdcopier::start_copy));
  tdcopier::bind_parcels(m);
  tdcopier::bind_channels(m);
  tdcopier::bind_slabs(m);
  m.def("explain", guarded(&tdcopier::explain));
  m.def("start_copy_into", guarded(&tdcopier::start_copy_into));
  m.def("start_gather", guarded(&tdcopier::start_gather));
  m.def("start_gather_into", guarded(&tdcopier::start_gather_into));
  m.def("start_scatter", guarded(&tdcopier::start_scatter));
  m.def("raise_bad_rows", guarded(&tdcopier::BadRowWatch::raise_of_dropped));

  py::class_<PreparedCopy>(m, "PreparedCopy", py::custom_type_setup(make_collectable<PreparedCopy>))
      .def(py::init([](py::handle example, py::handle device, const CopyOptions& options,
                       bool reuse_outputs) {
        return with_torch_errors([&] {
          return std::make_unique<PreparedCopy>(example, device, options, reuse_outputs);
        });
      }))
      .def("start_copy", guarded(&PreparedCopy::start_copy))
      .def("layout_of", guarded(&PreparedCopy::layout_of))
      .def_property_readonly(
          "device",
          [](const PreparedCopy& self) {
            return py::reinterpret_steal<py::object>(THPDevice_New(self.target()));
          })
      .def_property_readonly("fits", &PreparedCopy::fits)
      .def_property_readonly("misfits", &PreparedCopy::misfits)
      .def_property_readonly("bytes", &PreparedCopy::bytes)
      .def_property_readonly("keeps_outputs", &PreparedCopy::keeps_outputs);

  tdcopier::bind_memory(m);
  tdcopier::bind_testing(m);

  py::class_<DeviceAccess>(m, "DeviceAccess")
      .def(py::init([](py::handle stream) {
        return with_torch_errors([&] {
          const auto device = tdcopier::device_of_stream(stream);
          if (!device || device->is_cpu()) {
            throw py::type_error("DeviceAccess() takes a stream of an accelerator");
          }
          return std::make_unique<DeviceAccess>(tdcopier::parse_stream(stream, *device));
        });
      }))
      .def("has_ended", guarded(&DeviceAccess::has_ended))
      .def("wait", guarded(&DeviceAccess::wait))
      .def("order", guarded(&DeviceAccess::order));

  m.def("pairs_with_paths", guarded(&pairs_with_paths), py::arg("source"), py::arg("destination"),
        py::arg("source_name") = "source", py::arg("destination_name") = "destination");
  m.def("tables_with_paths", guarded(&tables_with_paths));
  m.def("forget_rules", [] {
    tdcopier::forget_rules();
    tdcopier::KnownLayouts::get().clear();
  });
  m.def("is_dict_of_tensors", &tdcopier::is_dict_of_tensors);
  m.def("leaves_with_paths", [](py::handle data, py::handle device) {
    return with_torch_errors(
        [&] { return tdcopier::leaves_with_paths(data, tdcopier::parse_device(device)); });
  });

  m.def("engine_takes", of_device(&tdcopier::engine_takes));
  m.def("staging_bytes", of_device([](c10::Device target) -> uint64_t {
          if (!tdcopier::has_engine_transfers(target)) return 0;
          return tdcopier::Accelerator::of(target).staging().pinned_bytes();
        }));
  m.def("copy_stream", guarded(&copy_stream), py::arg("device"), py::arg("which") = "to_device");
  m.def("why_no_segment_kernel", of_device(&tdcopier::why_no_segment_kernel));
  m.def("use_segment_kernel", &tdcopier::use_segment_kernel);
  m.def("has_row_kernels", of_device([](c10::Device device) {
          return tdcopier::has_engine_transfers(device) && tdcopier::row_kernels(device) != nullptr;
        }));
  m.attr("MAX_STRAIGHT_BYTES") = tdcopier::kMaxStraightBytes;
  m.def("default_worker_count", &tdcopier::default_worker_count);
  m.def("set_most_workers", &tdcopier::set_most_workers);
  m.def("time_steps", &tdcopier::time_phases);
  m.def("are_steps_timed", &tdcopier::are_phases_timed);
  // Releases the memory of finished copies now, for a caller that is about to allocate.
  m.def("reclaim", [] {
    tdcopier::Reclaimer::get().look();
    tdcopier::release_returned_sources();
  });
  m.attr("STAGING_BUFFER_BYTES") = tdcopier::kStagingBufferBytes;
  m.attr("DEFAULT_STAGING_LIMIT_BYTES") = tdcopier::kDefaultStagingLimitBytes;
  m.def("set_staging_limit_bytes", &tdcopier::StagingRing::set_limit_bytes);
  m.attr("MAX_INLINE_BYTES") = tdcopier::kMaxInlineBytes;
  m.attr("DEFAULT_RUN_AHEAD_LIMIT") = tdcopier::kDefaultRunAheadLimit;
  m.def("set_run_ahead_limit", &tdcopier::RunAhead::set_limit);
  m.def("shut_down", [] {
    tdcopier::stop_returning_sources();
    {
      const WithoutGil no_gil;
      tdcopier::shut_down_workers();
    }
    tdcopier::release_returned_sources();
  });
}
