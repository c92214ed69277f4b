// Python bindings of the schedule, for tdcopier/sim/_schedule.py.
#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <chrono>
#include <string>
#include <tuple>

#include "sim/controls.h"
#include "sim/runtime.h"
#include "sim/schedule.h"

namespace py = pybind11;

namespace tdcopier::sim {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;  // for calls that may block

void begin(std::uint64_t seed, double stall_seconds) {
  for_all_streams([](const StreamQueue& stream) {
    TORCH_CHECK(!stream.is_held(), stream.name(), " is held: release it before a schedule begins");
  });
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) synchronize(i);
  Schedule::get().begin(seed, std::chrono::duration_cast<std::chrono::nanoseconds>(
                                  std::chrono::duration<double>(stall_seconds)));
}

auto record() {
  auto record = Schedule::get().record();
  return std::make_tuple(std::move(record.steps), record.fingerprint, record.choices,
                         record.most_pending, std::move(record.failure), record.abandoned);
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::register_exception<DeadlockError>(m, "DeadlockError", PyExc_RuntimeError);

  m.def("interleaver", [] {
    return py::capsule(static_cast<Interleaver*>(&Schedule::get()), "tdcopier.Interleaver");
  });
  m.def("schedule_is_on", &Schedule::is_on);
  m.def("schedule_begin", &begin, py::arg("seed"), py::arg("stall_seconds"), Release());
  m.def(
      "schedule_await_workers", [](std::size_t count) { Schedule::get().await_workers(count); },
      py::arg("count"), Release());
  m.def("schedule_end", [] { Schedule::get().end(); }, Release());
  m.def("schedule_point", [] { Schedule::get().point(); }, Release());
  m.def(
      "schedule_announce_thread",
      [](std::string name) { return Schedule::get().announce_thread(std::move(name)); },
      py::arg("name"));
  m.def(
      "schedule_await_thread", [](std::size_t number) { Schedule::get().await_thread(number); },
      py::arg("number"), Release());
  m.def(
      "schedule_enter", [](std::size_t number) { Schedule::get().enter(number); },
      py::arg("number"), Release());
  m.def("schedule_leave", [] { Schedule::get().leave(); }, Release());
  m.def(
      "schedule_wait_for_leave", [](std::size_t number) { Schedule::get().wait_for_leave(number); },
      py::arg("number"), Release());
  m.def("schedule_record", &record);
}

}  // namespace tdcopier::sim
