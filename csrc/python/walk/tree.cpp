// Implements the treespec: its references, and building the result.
#include "python/walk/tree.h"

#include <utility>

#include "python/runtime/collector.h"
#include "python/walk/tensordict_node.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Walks the spec once more, in the same order, with a cursor on nodes and one on keys.
class Builder {
 public:
  Builder(const RecycledVector<TreeSpec::Node>& nodes, const RecycledVector<PyObject*>& keys,
          const RecycledVector<PyObject*>& values, LeafTensors& leaves)
      : node_(nodes.data()), key_(keys.data()), values_(values), leaves_(leaves) {}

  // Builds the next node and its children. Throws py::error_already_set.
  py::object build() {
    const TreeSpec::Node node = *node_++;
    switch (node.kind) {
      case NodeKind::kLeaf:
        return checked(leaves_.take(node.group, node.number));
      case NodeKind::kReady:
        return py::reinterpret_borrow<py::object>(values_[node.number]);
      case NodeKind::kList:
        return build_list(node.number);
      case NodeKind::kTuple: {
        py::object tuple = checked(uncollected([&] { return PyTuple_New(node.number); }));
        for (uint32_t i = 0; i < node.number; ++i) {
          PyTuple_SET_ITEM(tuple.ptr(), i, build().release().ptr());
        }
        return tuple;
      }
      case NodeKind::kCustom: {
        PyObject* unflatten = *key_++;
        PyObject* context = *key_++;
        const py::object children = build_list(node.number);
        return checked(PyObject_CallFunctionObjArgs(unflatten, children.ptr(), context, nullptr));
      }
      case NodeKind::kDict:
        return build_dict(node.number);
      case NodeKind::kTensorDict: {
        PyObject* const* const state = std::exchange(key_, key_ + 5);
        py::object made =
            make_tensordict(state[0], build_dict(node.number), state[1], state[2], state[3]);
        if (state[4] == Py_True) made.attr("lock_")();
        return made;
      }
      case NodeKind::kTensorClass: {
        PyObject* const* const state = std::exchange(key_, key_ + 2);
        return make_tensorclass(state[0], build(), state[1]);
      }
    }
    Py_UNREACHABLE();
  }

 private:
  py::object build_dict(uint32_t children) {
    py::object dict = checked(uncollected(PyDict_New));
    for (uint32_t i = 0; i < children; ++i) {
      PyObject* key = *key_++;
      const py::object value = build();
      if (PyDict_SetItem(dict.ptr(), key, value.ptr()) != 0) throw py::error_already_set();
    }
    return dict;
  }

  py::object build_list(uint32_t children) {
    py::object list = checked(uncollected([&] { return PyList_New(children); }));
    for (uint32_t i = 0; i < children; ++i) {
      PyList_SET_ITEM(list.ptr(), i, build().release().ptr());
    }
    return list;
  }

  static py::object checked(PyObject* made) {
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }

  const TreeSpec::Node* node_;
  PyObject* const* key_;
  const RecycledVector<PyObject*>& values_;
  LeafTensors& leaves_;
};

}  // namespace

void TreeSpec::reserve(size_t nodes) {
  nodes_.reserve(nodes);
  keys_.reserve(nodes);
}

void TreeSpec::set_leaf(size_t node, size_t group, size_t leaf) {
  nodes_[node] = {NodeKind::kLeaf, static_cast<uint16_t>(group), static_cast<uint32_t>(leaf)};
}

size_t TreeSpec::set_ready(size_t node, PyObject* value) {
  values_.push_back(value);
  nodes_[node] = {NodeKind::kReady, 0, static_cast<uint32_t>(values_.size() - 1)};
  return values_.size() - 1;
}

void TreeSpec::add_key(PyObject* key) {
  Py_INCREF(key);
  keys_.push_back(key);
}

void TreeSpec::append(const TreeSpec& other, PyObject* key, PyObject* new_key) {
  const size_t values = values_.size();
  for (Node node : other.nodes_) {
    if (node.kind == NodeKind::kReady) node.number += static_cast<uint32_t>(values);
    nodes_.push_back(node);
  }
  for (PyObject* each : other.keys_) keys_.push_back(Py_NewRef(each == key ? new_key : each));
  for (PyObject* value : other.values_) values_.push_back(Py_NewRef(value));
}

void TreeSpec::replace_value(size_t index, py::object value) {
  PyObject* old = std::exchange(values_[index], value.release().ptr());
  Py_DECREF(old);
}

void TreeSpec::replace_key(size_t index, py::object key) {
  PyObject* old = std::exchange(keys_[index], key.release().ptr());
  Py_DECREF(old);
}

py::object TreeSpec::unflatten(LeafTensors& leaves) const {
  return Builder(nodes_, keys_, values_, leaves).build();
}

void TreeSpec::clear() {
  nodes_.clear();
  // Empties the members first: a finalizer may call this function again.
  const RecycledVector<PyObject*> keys = std::exchange(keys_, {});
  const RecycledVector<PyObject*> values = std::exchange(values_, {});
  for (PyObject* key : keys) Py_DECREF(key);
  for (PyObject* value : values) Py_DECREF(value);
}

int TreeSpec::traverse(visitproc visit, void* arg) const {
  for (PyObject* key : keys_) Py_VISIT(key);
  for (PyObject* value : values_) Py_VISIT(value);
  return 0;
}

void TreeSpec::swap(TreeSpec& other) noexcept {
  nodes_.swap(other.nodes_);
  keys_.swap(other.keys_);
  values_.swap(other.values_);
}

}  // namespace tdcopier
