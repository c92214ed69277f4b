// Reads and writes the instance's `__dict__`.
#include "python/walk/tensordict_node.h"

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
  PyObject* others = PyUnicode_InternFromString("_non_tensordict");
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

py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object state_of(PyObject* value) {
  return checked(PyObject_GenericGetDict(value, nullptr));
}

// Makes an instance without calling its `__init__`.
py::object new_instance(py::handle type) {
  static PyObject* const no_arguments = PyTuple_New(0);
  auto* const class_ = reinterpret_cast<PyTypeObject*>(type.ptr());
  return checked(class_->tp_new(class_, no_arguments, nullptr));
}

}  // namespace

std::optional<TensorDictNode> read_tensordict(PyObject* value) {
  const py::object state = state_of(value);
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
  py::object made = new_instance(type);
  // Not a new dict: PyObject_GenericSetDict has no effect on the attributes in Python 3.13.0.
  const py::object state = state_of(made.ptr());
  set_item(state.ptr(), names().device, device.ptr());
  set_item(state.ptr(), names().tensordict, entries.ptr());
  set_item(state.ptr(), names().batch_size, batch_size.ptr());
  if (dim_names.is_none()) {
    set_item(state.ptr(), names().names, Py_None);
  } else {
    const py::object copied = checked(PySequence_List(dim_names.ptr()));
    set_item(state.ptr(), names().names, copied.ptr());
  }
  return made;
}

std::optional<TensorClassNode> read_tensorclass(PyObject* value, bool with_none) {
  const py::object state = state_of(value);
  TensorClassNode node{item(state.ptr(), names().tensordict), item(state.ptr(), names().others)};
  if (!node.tensordict || !node.others || !PyDict_CheckExact(node.others.ptr())) {
    return std::nullopt;
  }
  const py::object fields = std::exchange(node.others, checked(PyDict_New()));
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* field = nullptr;
  while (PyDict_Next(fields.ptr(), &position, &name, &field) != 0) {
    if (with_none || field != Py_None) set_item(node.others.ptr(), name, field);
  }
  return node;
}

py::object make_tensorclass(py::handle type, py::handle tensordict, py::handle others) {
  py::object made = new_instance(type);
  const py::object state = state_of(made.ptr());
  set_item(state.ptr(), names().tensordict, tensordict.ptr());
  set_item(state.ptr(), names().others, checked(PyDict_Copy(others.ptr())).ptr());
  return made;
}

}  // namespace tdcopier
