// Python bindings of the simulation: plain functions of numbers, which tdcopier/sim wraps.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <tuple>

#include "sim/autograd_threads.h"
#include "sim/controls.h"
#include "sim/counters.h"
#include "sim/device_allocator.h"
#include "sim/gate.h"
#include "sim/guard.h"
#include "sim/hooks.h"
#include "sim/pinned_allocator.h"
#include "sim/registrations.h"
#include "sim/row_kernels.h"
#include "sim/runtime.h"

namespace py = pybind11;

namespace tdcopier::sim {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;  // for calls that may block

// Registers the simulation as the process's accelerator. Loading the module does not, because users
// must ask for this explicitly.
void enable(int count) {
  TORCH_CHECK(!c10::impl::hasDeviceGuardImpl(kDeviceType) && !at::isPrivateUse1HooksRegistered(),
              "torch's PrivateUse1 device is in use by another backend");
  create_devices(count);
  register_hooks();
  c10::SetAllocator(kDeviceType, &DeviceAllocator::get());
  at::setHostAllocator(kDeviceType, &PinnedAllocator::get());
  register_guard();
  register_rnn_cells();
  register_operators();
  register_sparse_operators();
  register_autocast();
  start_missing_autograd_threads(count);
  // Costs nothing, and until then torch treats no memory as pinned.
  at::globalContext().lazyInitDevice(kDeviceType);
}

// Pins memory in place for the engine, through `tdcopier._C.set_pinning_calls`, whose
// tdcopier::PinningCalls this repeats.
struct {
  int (*pin)(void* begin, size_t bytes);
  int (*unpin)(void* begin);
} g_pinning_calls{
    [](void* begin, size_t bytes) { return PinnedAllocator::get().pin(begin, bytes); },
    [](void* begin) { return PinnedAllocator::get().unpin(begin); },
};

// Moves rows for the engine, through `tdcopier._C.set_row_kernels`, whose tdcopier::RowKernels this
// repeats.
struct {
  void (*move)(const c10::Stream& stream, const RowMove& move);
  void (*number)(const c10::Stream& stream, const RowNumbering& numbering);
} g_row_kernels{move_rows, number_rows};

// Creates streams for the engine, through `tdcopier._C.set_stream_maker`.
c10::Stream (*g_stream_maker)(c10::Device) = private_stream;

StreamQueue& queue_at(int device, c10::StreamId id) {
  return queue_of(c10::Stream(c10::Stream::UNSAFE,
                              c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)), id));
}

std::uint64_t busy_for(int device, c10::StreamId id, double seconds) {
  const auto time =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
  return queue_at(device, id).enqueue({"busy", [gate = Gate::make(), time] {
                                         gate->pass_within(time);
                                       }});
}

std::uint64_t busy_until_open(int device, c10::StreamId id, std::shared_ptr<Gate> gate) {
  return queue_at(device, id)
      .enqueue({"gate", [gate] { gate->pass(); }, [gate] { return gate->arrive(); }});
}

c10::StreamId exchange_stream_id(int device, c10::StreamId id) {
  const c10::Device on(kDeviceType, static_cast<c10::DeviceIndex>(device));
  return exchange_stream(c10::Stream(c10::Stream::UNSAFE, on, id)).id();
}

int exchange_device(int device) {
  const auto previous = current_device();
  set_current_device(resolve_device(static_cast<c10::DeviceIndex>(device)));
  return previous;
}

auto memory_stats(int device) {
  const auto stats = DeviceAllocator::get().stats(static_cast<c10::DeviceIndex>(device));
  return std::make_tuple(stats.allocated, stats.peak_allocated, stats.reserved, stats.peak_reserved,
                         stats.allocations);
}

auto pinned_bytes() {
  const auto bytes = PinnedAllocator::get().bytes();
  return std::make_tuple(bytes.in_use, bytes.current, bytes.peak);
}

auto transfer_counts() {
  const auto all = counts();
  const auto pair = [&](Direction direction) {
    const auto& count = all[static_cast<std::size_t>(direction)];
    return std::make_tuple(count.transfers, count.bytes);
  };
  return std::make_tuple(pair(Direction::kHostToDevice), pair(Direction::kDeviceToHost),
                         pair(Direction::kDeviceToDevice), pair(Direction::kWithinDevice));
}

// For tests: prints the native stack of the first thread that C++ terminates. Torch's handler of
// the signal that follows asks all threads for theirs, and the process may end before that one
// answers.
[[noreturn]] void print_stack_and_abort() {
  static std::atomic_flag is_printing;
  while (is_printing.test_and_set()) ::pause();
  try {
    if (const auto error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& error) {
    (void)!::write(STDERR_FILENO, error.what(), std::strlen(error.what()));
  } catch (...) {  // nothing is known of it
  }
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::backtrace_symbols_fd(frames.data(), count, STDERR_FILENO);
  std::abort();
}

// By its library: others that are loaded may export a std::set_terminate() of their own.
void print_stack_at_terminate() {
  using SetTerminate = std::terminate_handler (*)(std::terminate_handler);
  void* const library = ::dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  void* const found = library == nullptr ? nullptr : ::dlsym(library, "_ZSt13set_terminatePFvvE");
  TORCH_CHECK(found != nullptr, "std::set_terminate() was not found in libstdc++.so.6");
  reinterpret_cast<SetTerminate>(found)(&print_stack_and_abort);
}

}  // namespace

PYBIND11_MODULE(_sim, m) {
  m.doc() = "The simulated accelerator of tdcopier.sim; torch must be imported first.";

  // Replaces torch's own translator: without one, messages of c10 errors show the C++ stack.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const c10::ValueError& e) {
      PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
    } catch (const c10::AcceleratorError& e) {
      py::set_error(py::module_::import("torch").attr("AcceleratorError"),
                    e.what_without_backtrace());
    } catch (const c10::Error& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
    }
  });

  py::options docstrings;
  docstrings.disable_function_signatures();
  m.attr("MAX_DEVICES") = kMaxDevices;
  bind_controls(m);
  bind_detect(m);
  bind_schedule(m);

  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate", R"(
A gate that a stream waits for, see :func:`tdcopier.sim.busy`.

For example::

    gate = sim.Gate()
    sim.busy(gate)
    handle = tdcopier.start_copy(on_device, "cpu")
    assert not handle.ready()  # its stream waits
    gate.open())")
      .def(py::init(&Gate::make))
      .def("open", &Gate::open, "Let all streams that wait, now or later, continue.", Release())
      .def("is_open", &Gate::is_open, "Return whether streams pass.", Release())
      .def("wait_until_reached", &Gate::wait_until_reached,
           "Block until an operation has reached the gate, or the gate is open.", Release());

  m.def("enable", &enable, py::arg("devices"));
  m.def("stream_maker", [] { return py::capsule(&g_stream_maker, "tdcopier.StreamMaker"); });
  m.def("row_kernels", [] { return py::capsule(&g_row_kernels, "tdcopier.RowKernels"); });
  m.def("pinning_calls", [] { return py::capsule(&g_pinning_calls, "tdcopier.PinningCalls"); });
  m.def("unpin", [](std::uintptr_t address) {  // for tests of the detector
    return PinnedAllocator::get().unpin(reinterpret_cast<void*>(address));
  });
  m.def("shut_down", &shut_down, Release());
  m.def("in_forked_child", &in_forked_child);
  m.def("print_stack_at_terminate", &print_stack_at_terminate);

  m.def("device_count", [] { return int{device_count()}; });
  m.def("current_device", [] { return int{current_device()}; });
  m.def("exchange_device", &exchange_device, py::arg("device"));
  m.def("exchange_stream", &exchange_stream_id, py::arg("device"), py::arg("stream_id"));

  m.def(
      "hold", [](int device, c10::StreamId id) { queue_at(device, id).hold(); }, py::arg("device"),
      py::arg("stream_id"), Release());
  m.def(
      "release", [](int device, c10::StreamId id) { queue_at(device, id).release(); },
      py::arg("device"), py::arg("stream_id"), Release());
  m.def("busy_for", &busy_for, py::arg("device"), py::arg("stream_id"), py::arg("seconds"),
        Release());
  m.def("busy_until_open", &busy_until_open, py::arg("device"), py::arg("stream_id"),
        py::arg("gate"), Release());
  m.def(
      "synchronize", [](int device) { synchronize(static_cast<c10::DeviceIndex>(device)); },
      py::arg("device"), Release());

  m.def("transfer_counts", &transfer_counts);
  m.def("event_counts", &event_counts);
  m.def("pinned_queries", &pinned_queries);
  m.def("reset_counts", &reset_counts);
  m.def("memory_stats", &memory_stats, py::arg("device"));
  m.def(
      "reset_peak_memory_stats",
      [](int device) {
        DeviceAllocator::get().resetPeakStats(static_cast<c10::DeviceIndex>(device));
      },
      py::arg("device"));
  m.def(
      "set_memory_limit_bytes",
      [](int device, std::optional<std::int64_t> bytes) {
        DeviceAllocator::get().set_limit(static_cast<c10::DeviceIndex>(device), bytes);
      },
      py::arg("device"), py::arg("bytes"));
  m.def("empty_cache", [] { DeviceAllocator::get().emptyCache(); });
  m.def("pinned_bytes", &pinned_bytes);
  m.def("reset_peak_pinned_bytes", [] { PinnedAllocator::get().reset_peak_stats(); });
  m.def("empty_pinned_cache", [] { PinnedAllocator::get().empty_cache(); });
}

}  // namespace tdcopier::sim
