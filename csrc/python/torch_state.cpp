// Checks torch function modes through Python objects; the engine checks the rest.
#include "python/torch_state.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/python_headers.h>

#include "engine/device/graph_capture.h"
#include "engine/leaves/leaf.h"
#include "python/device_argument.h"

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
  if (at::getAccelerator() != kCuda) return true;
  const c10::impl::VirtualGuardImpl backend(kCuda);
  const c10::Device current = backend.getDevice();
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(kCuda);
  return !hooks.hasPrimaryContext(current.index()) || !is_capturing(backend.getStream(current));
}

}  // namespace tdcopier
