// Python bindings of the detection, for tdcopier/sim/_detect.py.
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "sim/controls.h"
#include "sim/runtime.h"
#include "sim/tracker.h"

namespace py = pybind11;

namespace tdcopier::sim {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;  // for calls that may block

auto hazards() {
  std::vector<std::pair<std::string, std::string>> all;
  for (auto& hazard : Tracker::get().hazards()) {
    all.emplace_back(std::move(hazard.kind), std::move(hazard.message));
  }
  return all;
}

// Waits until all streams have run their work. Returns false at once if a stream is held. Does not
// report failures, which the next wait for the failed work does.
bool run_dry() {
  bool is_held = false;
  for_all_streams([&](const StreamQueue& stream) { is_held = is_held || stream.is_held(); });
  if (is_held) return false;
  for (const auto& point : last_positions()) point.stream->reach(point.position);
  return true;
}

auto in_use() {
  std::vector<std::tuple<std::optional<int>, std::size_t, std::uint64_t>> all;
  for (const auto& block : Tracker::get().in_use()) {
    all.emplace_back(block.device, block.size, block.number);
  }
  return all;
}

}  // namespace

void bind_detect(py::module_& m) {
  m.def("detect_begin", [] { Tracker::get().begin(); });
  m.def("detect_end", [] { Tracker::get().end(); });
  m.def("detect_hazards", &hazards);
  m.def("run_dry", &run_dry, Release());
  m.def("detect_in_use", &in_use);
  m.def(
      "detect_older_given_back",
      [](std::size_t size) { return Tracker::get().older_given_back(size); }, py::arg("size"));
}

}  // namespace tdcopier::sim
