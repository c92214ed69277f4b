// What a class of values is to the walk: a container, a kind of leaf, or opaque.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "python/path.h"

namespace tdcopier {

enum class ValueKind : uint8_t {
  kOpaque,
  kArray,      // a numpy array: it depends on its dtype
  kDelegated,  // a tensor subclass or the like, with a `.to` of its own
  kMapped,     // a tensor subclass over a file's plain bytes, which `.to` elsewhere makes a tensor
  kContainer,
  kCollection,  // a container with a `.to` of its own: it depends on the target
};

// A class, once it was looked up.
struct KnownType {
  pybind11::object type;
  ValueKind kind;
  // Of containers: flatten(value) -> (children, context, names), unflatten(children, context). Of
  // collections: flatten(value, target, named) -> the same, or None to leave it to its own `.to`.
  pybind11::object flatten;
  pybind11::object unflatten;
  PathStep::Kind step;
};

// The classes that one walk has met besides list, tuple, dict and tensors. GIL: held.
class KnownTypes {
 public:
  // Values of the commonest opaque classes, without a look-up.
  static bool is_plain_opaque(const PyTypeObject* type) {
    return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyFloat_Type ||
           type == Py_TYPE(Py_None) || type == &PyBool_Type || type == &PyBytes_Type;
  }

  // The reference is good until the next call. Runs Python code for a class that is new.
  const KnownType& of(PyTypeObject* type) {
    if (last_ < types_.size() && is(types_[last_], type)) return types_[last_];
    return find(type);
  }

 private:
  static bool is(const KnownType& known, const PyTypeObject* type) {
    return known.type.ptr() == reinterpret_cast<const PyObject*>(type);
  }
  const KnownType& find(PyTypeObject* type);

  std::vector<KnownType> types_;
  size_t last_ = 0;
};

}  // namespace tdcopier
