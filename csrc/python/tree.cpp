// The treespec: its references, and building the result.
#include "python/tree.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace py = pybind11;

namespace tdcopier {
namespace {

// Walks the spec once more, in the same order, with a cursor on nodes and one on references.
class Builder {
 public:
  Builder(const std::vector<TreeSpec::Node>& nodes, const std::vector<PyObject*>& references,
          const std::function<at::Tensor(uint32_t)>& leaf)
      : node_(nodes.data()), reference_(references.data()), leaf_(leaf) {}

  // A new reference. Throws py::error_already_set.
  py::object build() {
    const TreeSpec::Node node = *node_++;
    switch (node.kind) {
      case NodeKind::kLeaf:
        return checked(THPVariable_Wrap(leaf_(node.number)));
      case NodeKind::kReady:
        return py::reinterpret_borrow<py::object>(*reference_++);
      case NodeKind::kList: {
        py::object list = checked(PyList_New(node.number));
        for (uint32_t i = 0; i < node.number; ++i) {
          PyList_SET_ITEM(list.ptr(), i, build().release().ptr());
        }
        return list;
      }
      case NodeKind::kTuple: {
        py::object tuple = checked(PyTuple_New(node.number));
        for (uint32_t i = 0; i < node.number; ++i) {
          PyTuple_SET_ITEM(tuple.ptr(), i, build().release().ptr());
        }
        return tuple;
      }
      case NodeKind::kDict: {
        py::object dict = checked(PyDict_New());
        for (uint32_t i = 0; i < node.number; ++i) {
          PyObject* key = *reference_++;
          const py::object value = build();
          if (PyDict_SetItem(dict.ptr(), key, value.ptr()) != 0) throw py::error_already_set();
        }
        return dict;
      }
    }
    Py_UNREACHABLE();
  }

 private:
  static py::object checked(PyObject* made) {
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }

  const TreeSpec::Node* node_;
  PyObject* const* reference_;
  const std::function<at::Tensor(uint32_t)>& leaf_;
};

}  // namespace

void TreeSpec::reserve(size_t nodes) {
  nodes_.reserve(nodes);
}

size_t TreeSpec::refer_to(PyObject* object) {
  Py_INCREF(object);
  references_.push_back(object);
  return references_.size() - 1;
}

void TreeSpec::replace_reference(size_t index, py::object value) {
  PyObject* old = std::exchange(references_[index], value.release().ptr());
  Py_DECREF(old);
}

py::object TreeSpec::unflatten(const std::function<at::Tensor(uint32_t)>& leaf) const {
  return Builder(nodes_, references_, leaf).build();
}

void TreeSpec::clear() {
  nodes_.clear();
  const std::vector<PyObject*> references = std::exchange(references_, {});
  for (PyObject* reference : references) Py_DECREF(reference);
}

int TreeSpec::traverse(visitproc visit, void* arg) const {
  for (PyObject* reference : references_) Py_VISIT(reference);
  return 0;
}

void TreeSpec::swap(TreeSpec& other) noexcept {
  nodes_.swap(other.nodes_);
  references_.swap(other.references_);
}

}  // namespace tdcopier
