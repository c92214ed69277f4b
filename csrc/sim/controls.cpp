// Numbers for directions and kinds; tdcopier/sim has the names.
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

using Release = py::call_guard<py::gil_scoped_release>;  // for whatever may block

std::shared_ptr<Fault> arm(FaultKind kind, std::int64_t n, std::optional<int> direction,
                           std::optional<int> device) {
  std::optional<Direction> in_direction;
  if (direction) in_direction = static_cast<Direction>(*direction);
  std::optional<c10::DeviceIndex> on_device;
  if (device) on_device = resolve_device(static_cast<c10::DeviceIndex>(*device));
  return Fault::arm(kind, n, in_direction, on_device);
}

}  // namespace

void bind_controls(py::module_& m) {
  py::class_<Fault, std::shared_ptr<Fault>>(m, "Fault")
      .def("disarm", &Fault::disarm, Release())
      .def("struck", &Fault::struck);
  m.def(
      "fail_device_allocation",
      [](std::int64_t n, std::optional<int> device) {
        return arm(FaultKind::kDeviceAllocation, n, std::nullopt, device);
      },
      py::arg("n"), py::arg("device"));
  m.def(
      "fail_pinned_allocation",
      [](std::int64_t n) {
        return arm(FaultKind::kPinnedAllocation, n, std::nullopt, std::nullopt);
      },
      py::arg("n"));
  m.def(
      "fail_transfer",
      [](std::int64_t n, std::optional<int> direction, std::optional<int> device,
         bool when_it_runs) {
        return arm(when_it_runs ? FaultKind::kExecution : FaultKind::kEnqueue, n, direction,
                   device);
      },
      py::arg("n"), py::arg("direction"), py::arg("device"), py::arg("when_it_runs"));

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
