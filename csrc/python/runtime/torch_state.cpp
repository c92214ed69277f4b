// Asks Python objects for torch function modes and devices in use; the engine checks the rest.
#include "python/runtime/torch_state.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <string>

#include "engine/device/graph_capture.h"
#include "engine/leaves/leaf.h"
#include "python/runtime/device_argument.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Returns whether the mode is that of `with torch.device(...)`, which does not affect `Tensor.to`.
// Never imports its class: an import lets other threads in, and before it no such mode can exist.
bool is_device_context(PyObject* mode) {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch.utils._device");
  if (module == nullptr) return false;
  const py::object type = py::getattr(module, "DeviceContext", py::none());
  return reinterpret_cast<PyObject*>(Py_TYPE(mode)) == type.ptr();
}

// Returns torch's module of a device type, for example `torch.cuda`; None if there is none. Keeps
// it: finding it takes a microsecond.
py::handle device_module(c10::DeviceType type) {
  static std::array<PyObject*, c10::COMPILE_TIME_MAX_DEVICE_TYPES> modules{};
  PyObject*& module = modules[static_cast<size_t>(type)];
  if (module == nullptr) {
    const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
    py::object found = py::getattr(py::module_::import("torch"), name.c_str(), py::none());
    if (found.is_none()) return Py_None;
    module = found.release().ptr();
  }
  return module;
}

}  // namespace

bool is_mode_active() {
  using FunctionModes = at::impl::PythonTorchFunctionTLS;
  for (int64_t i = 0; i < FunctionModes::stack_len(); ++i) {
    if (!is_device_context(FunctionModes::get_stack_at(i)->ptr(getPyInterpreter()))) return true;
  }
  return dispatch_is_altered();
}

bool engine_takes(c10::Device target) {
  if (is_mode_active()) return false;
  if (has_engine_transfers(target)) return !is_capturing(parse_stream(py::none(), target));
  if (!target.is_cpu()) return false;
  // To the host: sources may be on a device, and only CUDA devices can be capturing.
  constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;
  if (at::getAccelerator() != kCuda || !is_in_use(kCuda)) return true;
  const c10::impl::VirtualGuardImpl backend(kCuda);
  const c10::Device current = backend.getDevice();
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(kCuda);
  return !hooks.hasPrimaryContext(current.index()) || !is_capturing(backend.getStream(current));
}

// A backend need not say whether it is initialised: one that is available counts as initialised.
bool is_in_use(c10::DeviceType type) {
  const py::handle module = device_module(type);
  if (!py::hasattr(module, "is_initialized")) {
    return at::globalContext().getAcceleratorHooksInterface(type).isAvailable();
  }
  return module.attr("is_initialized")().cast<bool>();
}

}  // namespace tdcopier
