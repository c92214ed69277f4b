// Devices of leaves, found through the tensors that own their memory.
#include "python/delegated.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "engine/accelerator.h"
#include "python/device_argument.h"

namespace py = pybind11;

namespace tdcopier {

std::vector<at::Tensor> plain_parts(const py::object& value) {
  if (THPVariable_CheckExact(value.ptr())) return {THPVariable_Unpack(value.ptr())};
  std::vector<at::Tensor> parts;
  const py::list found = py::module_::import("tdcopier._delegated").attr("plain_parts")(value);
  for (const py::handle part : found) parts.push_back(THPVariable_Unpack(part.ptr()));
  return parts;
}

void Users::note(const py::object& leaf) {
  for (const at::Tensor& part : plain_parts(leaf)) {
    if (has_engine_transfers(part.device())) add(part.device());
  }
}

void Users::add(c10::Device device) {
  if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
    devices_.push_back(device);
  }
}

std::vector<EventRef> Users::events() const {
  std::vector<EventRef> events;
  for (const c10::Device device : devices_) {
    events.push_back(Accelerator::of(device).record_current());
  }
  return events;
}

}  // namespace tdcopier
