// Calls `.to` leaf by leaf, then records what the calls have read and made.
#include "python/calls/call_to.h"

#include <torch/csrc/Device.h>

#include <exception>
#include <utility>

#include "engine/device/accelerator.h"
#include "engine/device/fallbacks.h"
#include "python/runtime/array_leaf.h"
#include "python/runtime/device_argument.h"
#include "python/walk/delegated_outputs.h"

namespace py = pybind11;

namespace tdcopier {

void fail_with_leaf(Handle& handle, py::error_already_set& error, const char* method,
                    const std::function<std::optional<std::string>()>& path) {
  if (!error.matches(PyExc_Exception)) throw;  // an interrupt is not a failure of the copy
  const py::object failure = error.value();
  if (py::hasattr(failure, "add_note")) {
    if (const std::optional<std::string> leaf = path()) {
      failure.attr("add_note")(std::string("tdcopier: raised by `") + method + "` of the leaf " +
                               *leaf);
    }
  }
  handle.fail_with(failure);
}

void call_to(Handle& handle, py::handle data, const std::vector<Delegated>& delegated,
             c10::Device target) {
  const py::object device = py::reinterpret_steal<py::object>(THPDevice_New(target));
  const py::object to_name = py::str("to");
  DelegatedOutputs outputs;
  LeafDevices readers;
  size_t node = 0;
  bool has_objects = false;  // part of whose results may be out of sight
  try {
    for (const Delegated& leaf : delegated) {
      node = leaf.node;
      const bool is_object = leaf.why == WhyDelegated::kObject;
      const auto source = py::reinterpret_borrow<py::object>(handle.spec().value(leaf.value));
      const bool is_array = is_array_type(Py_TYPE(source.ptr()));
      const py::object tensor =
          is_array ? tensor_from_array(source.ptr(), target.is_cpu()) : source;
      readers.note(tensor);
      py::object moved = tensor.attr(to_name)(device);
      has_objects |= is_object;
      const bool same = moved.is(source) || (moved.is(tensor) && target.is_cpu());
      if (same && !is_object) {  // an object may return itself with its tensors moved
        ++handle.counts().reused;
      } else {
        ++handle.counts().delegated;
        for (const at::Tensor& part : plain_parts(moved)) outputs.add(part);
      }
      handle.spec().replace_value(leaf.value, std::move(moved));
    }
  } catch (py::error_already_set& error) {
    return fail_with_leaf(handle, error, ".to", [&] { return path_of(data, node, target); });
  }
  try {
    const CountFallbacks counted(handle.fallbacks());
    outputs.read = readers.events();
    if ((has_objects || !outputs.storages.empty()) && has_engine_transfers(target)) {
      outputs.stream = parse_stream(py::none(), target);
      outputs.made = event_after(*outputs.stream);
    }
  } catch (...) {  // the device has failed
    return handle.fail_with(std::current_exception());
  }
  handle.attach(std::move(outputs));
}

}  // namespace tdcopier
