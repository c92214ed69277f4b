// Parses device and stream arguments.
#include "python/runtime/device_argument.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <string>

namespace py = pybind11;

namespace tdcopier {
namespace {

std::string type_name(py::handle object) {
  return Py_TYPE(object.ptr())->tp_name;
}

// Lets torch decide which device type a bare number means.
c10::Device device_of_number(py::handle number) {
  try {
    const py::object parsed = py::module_::import("torch").attr("device")(number);
    return reinterpret_cast<THPDevice*>(parsed.ptr())->device;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    throw py::value_error("device " + std::string(py::repr(number)) +
                          " does not exist: " + std::string(py::str(error.value())));
  }
}

c10::Device to_c10(py::handle device) {
  if (THPDevice_Check(device.ptr())) return reinterpret_cast<THPDevice*>(device.ptr())->device;
  const bool is_index = PyIndex_Check(device.ptr()) && !PyBool_Check(device.ptr()) &&
                        !THPVariable_Check(device.ptr());  // such as numpy's integers
  if (!PyUnicode_Check(device.ptr()) && !is_index) {
    throw py::type_error("device must be a str, a torch.device or an int, not " +
                         type_name(device));
  }
  if (is_index)
    return device_of_number(py::reinterpret_steal<py::object>(PyNumber_Index(device.ptr())));
  try {
    return c10::Device(device.cast<std::string>());
  } catch (const c10::Error&) {
    const auto name = device.cast<std::string>();
    const bool is_sim =
        name.substr(0, name.find(':')) == "sim" && c10::get_privateuse1_backend() != "sim";
    throw py::value_error("unknown device " + std::string(py::repr(device)) + ": " +
                          (is_sim ? "call tdcopier.sim.enable() before"
                                  : "an NVIDIA GPU is \"cuda\" or \"cuda:0\", the host \"cpu\", "
                                    "and the simulated device \"sim\""));
  }
}

}  // namespace

bool has_engine_transfers(c10::Device device) {
  switch (device.type()) {
    case c10::DeviceType::CUDA:
    case c10::DeviceType::XPU:
      return true;
    case c10::DeviceType::PrivateUse1:
      // The engine's chunks and outputs have storages of torch's own class.
      return at::isPrivateUse1HooksRegistered() &&
             c10::GetStorageImplCreate(c10::DeviceType::PrivateUse1) == nullptr;
    default:
      return false;
  }
}

c10::Device parse_device(py::handle argument) {
  const c10::Device device = to_c10(argument);
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  const auto kind = [&] { return c10::DeviceTypeName(device.type(), /*lower_case=*/true); };
  if (!c10::impl::hasDeviceGuardImpl(device.type())) {
    throw py::value_error("device " + device.str() +
                          " is not available: this torch was built without " + kind());
  }
  if (!has_engine_transfers(device)) return device;
  const c10::impl::VirtualGuardImpl backend(device.type());
  const int count = backend.deviceCount();
  if (count == 0 || device.index() >= count) {
    throw py::value_error("device " + device.str() + " does not exist: this machine has " +
                          std::to_string(count) + " " + kind() + " device(s)" +
                          (kind() == "sim" ? "; ask for more with tdcopier.sim.enable(devices=...) "
                                             "at the start of the program"
                                           : ""));
  }
  torch::utils::device_lazy_init(device.type());
  return device.has_index() ? device : backend.getDevice();
}

void check_is_stream(py::handle stream, c10::Device device) {
  if (stream.is_none() || THPStream_Check(stream.ptr())) return;
  throw py::type_error("stream must be None or a torch.Stream of " + device.str() + ", not " +
                       type_name(stream));
}

std::optional<c10::Device> device_of_stream(py::handle stream) {
  if (!THPStream_Check(stream.ptr())) return std::nullopt;
  const auto* given = reinterpret_cast<THPStream*>(stream.ptr());
  return c10::Device(static_cast<c10::DeviceType>(given->device_type),
                     static_cast<c10::DeviceIndex>(given->device_index));
}

c10::Stream parse_stream(py::handle stream, c10::Device device) {
  if (stream.is_none()) return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  check_is_stream(stream, device);
  const auto* given = reinterpret_cast<THPStream*>(stream.ptr());
  const c10::Stream parsed =
      c10::Stream::unpack3(given->stream_id, static_cast<c10::DeviceIndex>(given->device_index),
                           static_cast<c10::DeviceType>(given->device_type));
  if (parsed.device() != device) {
    throw py::value_error("stream is on " + parsed.device().str() + ", but the result is on " +
                          device.str() + ": give a stream of that device");
  }
  return parsed;
}

}  // namespace tdcopier
