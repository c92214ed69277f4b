// The walk: containers by exact type first, then tensors and arrays; everything else is opaque.
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "python/array_leaf.h"
#include "python/tree.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// `with torch.device(...)` is a torch function mode too, but one that leaves `Tensor.to` alone. Its
// class is looked up, never imported: an import lets other threads in, and there is no such mode
// before.
bool is_device_context(PyObject* mode) {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch.utils._device");
  if (module == nullptr) return false;
  const py::object type = py::getattr(module, "DeviceContext", py::none());
  return reinterpret_cast<PyObject*>(Py_TYPE(mode)) == type.ptr();
}

bool torch_is_altered() {
  using FunctionModes = at::impl::PythonTorchFunctionTLS;
  for (int64_t i = 0; i < FunctionModes::stack_len(); ++i) {
    if (!is_device_context(FunctionModes::get_stack_at(i)->ptr(getPyInterpreter()))) return true;
  }
  return dispatch_is_altered();
}

class Flattener {
 public:
  Flattener(c10::Device target, bool engine_transfers)
      : target_(target), engine_transfers_(engine_transfers), altered_(torch_is_altered()) {
    flat_.sources = std::make_unique<PySources>();
    load_numpy_types();
  }

  FlatTree run(PyObject* data) {
    visit(data, 0);
    sort_out_tensors();
    return std::move(flat_);
  }

 private:
  // How a child is reached from its container: by key, or by index where key is null.
  struct Step {
    PyObject* key;  // borrowed
    Py_ssize_t index;
  };

  struct Found {
    PyObject* object;  // borrowed: the GIL is held and no Python code runs until it is kept
    size_t node;
  };

  void visit(PyObject* object, int depth) {
    const PyTypeObject* type = Py_TYPE(object);
    if (THPVariable_CheckTypeExact(const_cast<PyTypeObject*>(type))) {
      tensors_.push_back({object, flat_.spec.nodes()});
      flat_.spec.add(NodeKind::kLeaf, 0);
    } else if (type == &PyDict_Type) {
      visit_dict(object, depth);
    } else if (type == &PyList_Type) {
      check_depth(depth);
      flat_.spec.add(NodeKind::kList, PyList_GET_SIZE(object));
      prefetch_each(reinterpret_cast<PyListObject*>(object)->ob_item, PyList_GET_SIZE(object));
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
        path_[depth] = {nullptr, i};
        visit(PyList_GET_ITEM(object, i), depth + 1);
      }
    } else if (type == &PyTuple_Type) {
      check_depth(depth);
      flat_.spec.add(NodeKind::kTuple, PyTuple_GET_SIZE(object));
      prefetch_each(reinterpret_cast<PyTupleObject*>(object)->ob_item, PyTuple_GET_SIZE(object));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
        path_[depth] = {nullptr, i};
        visit(PyTuple_GET_ITEM(object, i), depth + 1);
      }
    } else {
      visit_rare(object, depth);
    }
  }

  // The walk looks at each child's type: let the processor fetch all of them at once.
  static void prefetch_each(PyObject* const* children, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; ++i) __builtin_prefetch(children[i]);
  }

  void visit_dict(PyObject* dict, int depth) {
    check_depth(depth);
    flat_.spec.add(NodeKind::kDict, PyDict_GET_SIZE(dict));
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(dict, &position, &key, &value) != 0) __builtin_prefetch(value);
    position = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      flat_.spec.add_key(key);
      path_[depth] = {key, 0};
      visit(value, depth + 1);
    }
  }

  // Second pass, over tensors alone. What it reads of a tensor lies in three places that are rarely
  // in the cache after a step of training; fetching them ahead hides most of that.
  void sort_out_tensors() {
    flat_.leaves.reserve(tensors_.size());
    flat_.sources->reserve(tensors_.size());
    constexpr size_t kFar = 12;
    constexpr size_t kNear = 6;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (i + kFar < tensors_.size()) prefetch_tensor(tensors_[i + kFar].object);
      if (i + kNear < tensors_.size()) prefetch_storage(tensors_[i + kNear].object);
      sort_out(tensors_[i].object, tensors_[i].node);
    }
  }

  static void prefetch_tensor(PyObject* object) {
    const auto* impl =
        reinterpret_cast<const char*>(THPVariable_Unpack(object).unsafeGetTensorImpl());
    constexpr size_t kLine = 64;
    for (size_t at = 0; at < sizeof(c10::TensorImpl); at += kLine) __builtin_prefetch(impl + at);
  }

  static void prefetch_storage(PyObject* object) {
    const c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
    const auto* storage =
        reinterpret_cast<const char*>(impl->unsafe_storage().unsafeGetStorageImpl());
    __builtin_prefetch(storage);
    __builtin_prefetch(storage + 48);  // its size and data pointer may lie in the next line
  }

  void sort_out(PyObject* object, size_t node) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (altered_) {
      delegate(object, node);
    } else if (tensor.device() == target_) {
      flat_.spec.set_ready(node, object);
      ++flat_.reused;
    } else if (engine_transfers_ && flat_.leaves.add_if_packable(tensor)) {
      flat_.spec.set_leaf(node, flat_.leaves.size() - 1);
      flat_.sources->keep(object);
    } else {
      delegate(object, node);
    }
  }

  void visit_rare(PyObject* object, int depth) {
    const size_t node = flat_.spec.nodes();
    flat_.spec.add(NodeKind::kReady, 0);
    if (PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0) {
      delegate(object, node);  // a subclass decides itself what `.to` means
      return;
    }
    switch (classify_array(object)) {
      case ArrayKind::kNotAnArray:
      case ArrayKind::kOpaque:
        flat_.spec.set_ready(node, object);
        ++flat_.opaque;
        return;
      case ArrayKind::kUnknownNumber: {
        const std::string dtype = array_dtype_name(object);  // before Python code can run
        throw py::type_error(path_text(depth) + " is a numpy array of dtype " + dtype +
                             ", which torch does not have: convert it with .astype(...) first");
      }
      case ArrayKind::kConvertible:
        if (engine_transfers_ && !altered_ && add_array_leaf(object, flat_.leaves)) {
          flat_.spec.set_leaf(node, flat_.leaves.size() - 1);
          flat_.sources->keep(object);
        } else {
          delegate(object, node);
        }
    }
  }

  void delegate(PyObject* object, size_t node) {
    flat_.delegated.push_back(flat_.spec.set_ready(node, object));
  }

  void check_depth(int depth) const {
    if (depth < kMaxDepth) return;
    PyErr_Format(
        PyExc_RecursionError,
        "data is nested more than %d containers deep, from %s... on: does it contain itself?",
        kMaxDepth, path_text(8).c_str());
    throw py::error_already_set();
  }

  std::string path_text(int depth) const {
    std::string text = "data";
    for (int i = 0; i < depth; ++i) {
      const Step& step = path_[i];
      text += '[';
      text += step.key != nullptr ? std::string(py::repr(step.key)) : std::to_string(step.index);
      text += ']';
    }
    return text;
  }

  const c10::Device target_;
  const bool engine_transfers_;
  const bool altered_;
  FlatTree flat_;
  RecycledVector<Found> tensors_;  // by the first pass, in its order
  std::array<Step, kMaxDepth> path_;
};

}  // namespace

FlatTree flatten(PyObject* data, c10::Device target, bool engine_transfers) {
  return Flattener(target, engine_transfers).run(data);
}

}  // namespace tdcopier
