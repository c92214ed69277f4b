// Reads and writes the instance's `__dict__`.
#include "python/tensordict_node.h"

#include <torch/csrc/Device.h>

#include <utility>

namespace py = pybind11;

namespace tdcopier {
namespace {

// Never freed: strings may outlive the interpreter.
struct Names {
  PyObject* tensordict = PyUnicode_InternFromString("_tensordict");
  PyObject* batch_size = PyUnicode_InternFromString("_batch_size");
  PyObject* names = PyUnicode_InternFromString("_td_dim_names");
  PyObject* device = PyUnicode_InternFromString("_device");
  PyObject* is_locked = PyUnicode_InternFromString("_is_locked");
  PyObject* consolidated = PyUnicode_InternFromString("_consolidated");
};

const Names& names() {
  static const Names made;
  return made;
}

py::object item(PyObject* dict, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(found);
}

void set_item(PyObject* dict, PyObject* name, PyObject* value) {
  if (PyDict_SetItem(dict, name, value) != 0) throw py::error_already_set();
}

}  // namespace

std::optional<TensorDictNode> read_tensordict(PyObject* value) {
  const auto state = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(value, nullptr));
  if (!state) throw py::error_already_set();
  TensorDictNode node;
  node.entries = item(state.ptr(), names().tensordict);
  node.batch_size = item(state.ptr(), names().batch_size);
  node.names = item(state.ptr(), names().names);
  if (!node.names) node.names = py::none();  // as its class has it
  node.is_consolidated = static_cast<bool>(item(state.ptr(), names().consolidated));
  const py::object locked = item(state.ptr(), names().is_locked);  // missing: it never was
  if (locked) {
    const int is_true = PyObject_IsTrue(locked.ptr());
    if (is_true < 0) throw py::error_already_set();
    node.is_locked = is_true != 0;
  }
  const py::object device = item(state.ptr(), names().device);
  if (device && THPDevice_Check(device.ptr())) {
    node.device = reinterpret_cast<THPDevice*>(device.ptr())->device;
  }
  const bool complete = node.entries && PyDict_CheckExact(node.entries.ptr()) && node.batch_size &&
                        device && (device.is_none() || node.device);
  return complete ? std::optional(std::move(node)) : std::nullopt;
}

py::object make_tensordict(py::handle type, py::object entries, py::handle batch_size,
                           py::handle dim_names, py::handle device) {
  static PyObject* const no_arguments = PyTuple_New(0);
  auto* const class_ = reinterpret_cast<PyTypeObject*>(type.ptr());
  auto made = py::reinterpret_steal<py::object>(class_->tp_new(class_, no_arguments, nullptr));
  auto state = py::reinterpret_steal<py::object>(PyDict_New());
  if (!made || !state) throw py::error_already_set();
  set_item(state.ptr(), names().device, device.ptr());
  set_item(state.ptr(), names().tensordict, entries.ptr());
  set_item(state.ptr(), names().batch_size, batch_size.ptr());
  if (dim_names.is_none()) {
    set_item(state.ptr(), names().names, Py_None);
  } else {
    const auto copied = py::reinterpret_steal<py::object>(PySequence_List(dim_names.ptr()));
    if (!copied) throw py::error_already_set();
    set_item(state.ptr(), names().names, copied.ptr());
  }
  if (PyObject_GenericSetDict(made.ptr(), state.ptr(), nullptr) != 0) throw py::error_already_set();
  return made;
}

}  // namespace tdcopier
