// What a value of a rarer class is to a walk: a container, a kind of leaf, or opaque.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "python/path.h"

namespace tdcopier {

enum class ValueKind : uint8_t {
  kOpaque,
  kArray,      // a numpy array: of a class, it depends on its dtype
  kDelegated,  // a tensor subclass or the like, with a `.to` of its own
  kMapped,     // a tensor subclass over a file's plain bytes, which `.to` elsewhere makes a tensor
  kContainer,
  kCollection,  // of a class: a container with a `.to` of its own, it depends on the target
};

// A class, once it was looked up.
struct KnownType {
  pybind11::object type;
  ValueKind kind;
  // Of containers: flatten(value) -> (children, context, names), unflatten(children, context). Of
  // collections: flatten(value, target, named) -> the same, or None to leave it to its own `.to`.
  pybind11::object flatten{};
  pybind11::object unflatten{};
  PathStep::Kind step = PathStep::Kind::kIndex;
};

// How a walk takes collections apart.
struct CollectionRules {
  std::optional<c10::Device> target;  // none: their leaves are wanted wherever they are
  bool named;                         // are the names of their children wanted?
  bool left;                          // to their own `.to`, all of them
  pybind11::object flatten{};         // instead of the class's; null: none
  pybind11::object unflatten{};
};

// A value: neither kCollection, nor kArray where no tensor can hold it. Of a container that was
// taken apart it has references of its own.
struct Seen {
  ValueKind kind;
  PathStep::Kind step = PathStep::Kind::kIndex;
  pybind11::object children{};  // a list
  pybind11::object names{};     // a list of keys or attribute names; null: by index
  pybind11::object context{};
  pybind11::object unflatten{};
};

// Looks at the values that one walk meets besides lists, tuples, dicts and tensors. GIL: held.
class ValueLooks {
 public:
  explicit ValueLooks(CollectionRules rules);

  // Values of the commonest opaque classes, without a look-up.
  static bool is_plain_opaque(const PyTypeObject* type) {
    return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyFloat_Type ||
           type == Py_TYPE(Py_None) || type == &PyBool_Type || type == &PyBytes_Type;
  }

  // Runs Python code for a container, and for a class that is new. The value is at this depth of
  // the path in the tree that the caller calls `root`. Throws: TypeError, with the path, for a
  // container that cannot be rebuilt and for numbers that torch lacks; what the class's code
  // raises.
  Seen look(PyObject* object, const Path& path, int depth, const char* root);

 private:
  // The reference is good until the next call.
  const KnownType& known(PyTypeObject* type);
  Seen take_apart(const KnownType& known, PyObject* object);

  const CollectionRules rules_;
  pybind11::object target_;       // a torch.device or None; made when a collection asks for it
  std::vector<KnownType> types_;  // that the walk has met, few
};

}  // namespace tdcopier
