// Trees are compared node by node, and mostly by the addresses of their keys. So all keys and
// values that are kept are constants, whose addresses are in use for as long.
#include "python/walk/known_trees.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Size.h>

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace tdcopier {
namespace {

bool is_constant(PyObject* object) {
  if (PyTuple_CheckExact(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
      if (!is_constant(PyTuple_GET_ITEM(object, i))) return false;
    }
    return true;
  }
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) || PyBytes_CheckExact(object) ||
         PyType_Check(object) || THPSize_Check(object) || THPDevice_Check(object);
}

bool are_equal_sizes(PyObject* a, PyObject* b) {
  if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i) {
    PyObject* const mine = PyTuple_GET_ITEM(a, i);
    PyObject* const its = PyTuple_GET_ITEM(b, i);
    if (mine == its) continue;
    if (!PyLong_CheckExact(mine) || !PyLong_CheckExact(its)) return false;
    if (PyObject_RichCompareBool(mine, its, Py_EQ) != 1) return false;
  }
  return true;
}

// Returns whether both are written alike: the same object, or what each batch has anew. The device
// of a TensorDict is not written.
bool are_alike(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (THPSize_Check(a)) return are_equal_sizes(a, b);
  if (PyUnicode_CheckExact(a)) return PyUnicode_Compare(a, b) == 0;
  return THPDevice_Check(a);
}

bool is_alike(const TreeSpec::Node& a, const TreeSpec::Node& b) {
  return a.kind == b.kind && a.group == b.group && a.number == b.number;
}

}  // namespace

std::shared_ptr<const ParcelHead> KnownTrees::find(const TreeSpec& spec,
                                                   const LeafTable& leaves) const {
  const Known& known = known_[place_of(spec)];
  if (!known.head || spec.nodes() != known.spec.nodes()) return nullptr;
  for (size_t i = 0; i < spec.nodes(); ++i) {
    if (!is_alike(spec.node(i), known.spec.node(i))) return nullptr;
  }
  if (!std::ranges::equal(spec.keys(), known.spec.keys(), are_alike)) return nullptr;
  if (!std::ranges::equal(spec.values(), known.spec.values(), are_alike)) return nullptr;
  return leaves.is_like(*known.leaves) ? known.head : nullptr;
}

void KnownTrees::keep(const TreeSpec& spec, const LeafTable& leaves,
                      std::shared_ptr<const ParcelHead> head) {
  if (head->bytes.size() > kMostKeptBytes) return;
  for (size_t i = 0; i < spec.nodes(); ++i) {  // the code of other containers writes them
    if (spec.node(i).kind == NodeKind::kCustom) return;
  }
  if (!std::ranges::all_of(spec.keys(), is_constant)) return;
  if (!std::ranges::all_of(spec.values(), is_constant)) return;
  Known made;
  made.spec.append(spec, nullptr, nullptr);
  made.leaves = std::make_unique<const LeafTable>(leaves);
  made.head = std::move(head);
  const Known replaced = std::exchange(known_[place_of(spec)], std::move(made));
}

}  // namespace tdcopier
