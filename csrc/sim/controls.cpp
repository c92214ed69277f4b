// Binds the controls. Directions and kinds are plain numbers here; tdcopier/sim names them.
#include "sim/controls.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "sim/block_cache.h"
#include "sim/faults.h"
#include "sim/pace.h"
#include "sim/runtime.h"

namespace py = pybind11;

namespace tdcopier::sim {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;  // for calls that may block

std::optional<c10::DeviceIndex> checked(std::optional<int> device) {
  if (!device) return std::nullopt;
  return resolve_device(static_cast<c10::DeviceIndex>(*device));
}

}  // namespace

void bind_controls(py::module_& m) {
  py::class_<Fault, std::shared_ptr<Fault>>(m, "Fault")
      .def("disarm", &Fault::disarm, Release())
      .def("struck", &Fault::struck);
  m.def(
      "fail_device_allocation",
      [](std::int64_t n, std::optional<int> device) {
        return Fault::arm(
            {.kind = FaultKind::kDeviceAllocation, .n = n, .device = checked(device)});
      },
      py::arg("n"), py::arg("device"));
  m.def(
      "fail_pinned_allocation",
      [](std::int64_t n, std::int32_t code) {
        return Fault::arm({.kind = FaultKind::kPinnedAllocation, .n = n, .code = code});
      },
      py::arg("n"), py::arg("code"));
  m.def(
      "fail_transfer",
      [](std::int64_t n, std::optional<int> direction, std::optional<int> device,
         bool when_it_runs) {
        FaultPlan plan{.kind = when_it_runs ? FaultKind::kExecution : FaultKind::kEnqueue, .n = n};
        if (direction) plan.direction = static_cast<Direction>(*direction);
        plan.device = checked(device);
        return Fault::arm(plan);
      },
      py::arg("n"), py::arg("direction"), py::arg("device"), py::arg("when_it_runs"));
  m.def(
      "fail_event_record",
      [](std::int64_t n, std::optional<int> device) {
        return Fault::arm({.kind = FaultKind::kEventRecord, .n = n, .device = checked(device)});
      },
      py::arg("n"), py::arg("device"));
  m.def(
      "fail_event_query",
      [](std::int64_t n, std::optional<int> device, std::int64_t times, std::int32_t code) {
        return Fault::arm({.kind = FaultKind::kEventQuery,
                           .n = n,
                           .times = times,
                           .device = checked(device),
                           .code = code});
      },
      py::arg("n"), py::arg("device"), py::arg("times"), py::arg("code"));
  m.def(
      "fail_thread",
      [](std::int64_t n) { return Fault::arm({.kind = FaultKind::kThread, .n = n}); },
      py::arg("n"));

  py::class_<Pace, std::shared_ptr<Pace>>(m, "Pace").def("end", &Pace::end);
  m.def(
      "pace",
      [](int direction, double latency_us, double bytes_per_second) {
        return Pace::begin(static_cast<Direction>(direction), latency_us, bytes_per_second);
      },
      py::arg("direction"), py::arg("latency_us"), py::arg("bytes_per_second"));

  m.def(
      "exchange_poison",
      [](bool at_allocation, bool at_free) {
        const auto previous = exchange_poison({at_allocation, at_free});
        return std::make_pair(previous.at_allocation, previous.at_free);
      },
      py::arg("at_allocation"), py::arg("at_free"));
}

}  // namespace tdcopier::sim
