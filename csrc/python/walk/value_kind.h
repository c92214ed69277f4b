// Classifies values of the rarer classes for a walk: a container, a kind of leaf, or opaque.
// A delegated leaf, for example of a tensor subclass, is moved by its own `.to` during the call;
// delegated_outputs.h keeps the result.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "python/walk/path.h"

namespace tdcopier {

enum class ValueKind : uint8_t {
  kOpaque,
  kArray,      // a numpy array; arrays of some dtypes are opaque
  kDelegated,  // a leaf with its own `.to`, for example a tensor subclass
  kWrapped,    // a tensor subclass over plain memory: copied as a plain tensor, and wrapped again
  kObject,     // not a leaf, but has its own `.to`, which may change the object itself
  kMapped,     // a tensor subclass over a mapped file, which `.to` another device makes plain
  kContainer,
  kCollection,   // has its own `.to`; a container or left to it, by target
  kTensorDict,   // a collection of exactly this class, which the walk takes apart itself
  kTensorClass,  // the same, if its TensorDict is of exactly that class
};

// Why a leaf or object is moved by its own `.to`.
enum class WhyDelegated : uint8_t {
  kClass,      // tensors of its class are moved by their own `.to`
  kObject,     // no tensor: an object that has a `.to` of its own
  kTorchMode,  // a torch mode or transform is active
  kDevice,     // the engine does not move leaves between its device and the target
  kNotPlain,   // a copy of its bytes is not enough
};

// The result of looking up a class.
struct KnownType {
  pybind11::object type;
  ValueKind kind;
  // Containers: flatten(value) -> (children, context, names), unflatten(children, context).
  // Collections: flatten(value, target, named) -> the same, or None to leave it to its own `.to`.
  // Wrapped: flatten(value) -> context.
  pybind11::object flatten{};
  pybind11::object unflatten{};
  PathStep::Kind step = PathStep::Kind::kIndex;
  ValueKind left_as = ValueKind::kDelegated;  // collections: what they are if left to their `.to`
  // TensorDicts that the walk takes apart: flatten_entry(entry, target, named, batch_size) -> as
  // flatten, for entries that are no tensors; None for tensors. Else null.
  pybind11::object flatten_entry{};
  bool is_tensorclass = false;  // and no code of its own has to run for a copy
  bool keeps_none = false;      // tensorclasses: whether fields that are None stay
};

// How a walk flattens collections.
struct CollectionRules {
  std::optional<c10::Device> target;  // nullopt: flatten them wherever their leaves are
  bool named;                         // whether the walk needs the names of their children
  bool left;  // leave all that consist of tensors, and wrapped tensors, to their own `.to`
  pybind11::object flatten{};  // replaces that of TensorDicts; null: does not
  pybind11::object unflatten{};
  pybind11::object target_object{};  // what stands for the target; null: a torch.device
};

// The result of looking at a value. `kind` is kCollection only for the tensor collections of
// tensordict, and kArray only if a tensor can hold the array. Owns references to the parts of a
// container; a wrapped tensor has a context and `unflatten`.
struct Seen {
  ValueKind kind;
  PathStep::Kind step = PathStep::Kind::kIndex;
  pybind11::object children{};  // a list
  pybind11::object names{};     // a list of keys or attribute names; null: by index
  pybind11::object context{};
  pybind11::object unflatten{};
};

// Must be called when a class is registered or unregistered. GIL: held.
void forget_rules();

// Classifies the values of one walk other than lists, tuples, dicts and tensors. GIL: held.
class ValueLooks {
 public:
  explicit ValueLooks(CollectionRules rules);

  // Returns whether the type is one of the commonest opaque classes, without a look-up.
  static bool is_plain_opaque(const PyTypeObject* type) {
    return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyFloat_Type ||
           type == Py_TYPE(Py_None) || type == &PyBool_Type || type == &PyBytes_Type;
  }

  // Classifies a value, and flattens it if it is a container. Runs Python code for a container, and
  // for a class that is new to the walk. `path` and `depth` say where the value is, in the tree
  // called `root` in messages. Throws: TypeError, with the path, for a container that cannot be
  // rebuilt and for number types that torch lacks; any error of the class's code.
  Seen look(PyObject* object, const Path& path, int depth, const char* root);

  // Returns whether look() returns kTensorDict for values of this class.
  bool is_tensordict(PyTypeObject* type) { return kind_of(known(type)) == ValueKind::kTensorDict; }
  // The same for kTensorClass. Returns nullopt, or whether fields that are None stay.
  std::optional<bool> is_tensorclass(PyTypeObject* type) {
    const KnownType& its = known(type);
    return kind_of(its) == ValueKind::kTensorClass ? std::optional(its.keeps_none) : std::nullopt;
  }
  // Takes apart an entry, not of class TensorDict itself, of a TensorDict with this batch size.
  // Returns kDelegated without parts for a tensor. Runs Python code, and throws its errors.
  // Requires: look() has returned kTensorDict for a value of class `tensordict`.
  Seen look_into(PyTypeObject* tensordict, PyObject* entry, pybind11::handle batch_size);
  // Takes a TensorDict apart like any other collection.
  Seen look_at_collection(PyObject* tensordict) {
    return take_apart(known(Py_TYPE(tensordict)), tensordict);
  }

  // Returns whether it is a class of tensordict's collections, which have nested keys.
  bool is_of_tensordict(PyTypeObject* type) {
    return known(type).step == PathStep::Kind::kNestedKey;
  }
  // Returns whether it is the class TensorDict itself, whose values read_tensordict() can read.
  bool is_readable_tensordict(PyTypeObject* type) {
    return static_cast<bool>(known(type).flatten_entry);
  }
  // Takes only the outermost level of such a collection apart. `children` is a dict or a list; the
  // kind is kOpaque, and `context` the value, for non-tensor data. Errors: as look().
  Seen look_at_level(PyObject* collection, const Path& path, int depth, const char* root);

  // The target as a torch.device, or None.
  const pybind11::object& target();

 private:
  // The reference is valid until the next call.
  const KnownType& known(PyTypeObject* type);
  // Differs from the kind of the class for the collections that this walk takes apart itself.
  ValueKind kind_of(const KnownType& type) const {
    if (!rules_.target || rules_.left || rules_.flatten) return type.kind;
    if (type.flatten_entry) return ValueKind::kTensorDict;
    return type.is_tensorclass ? ValueKind::kTensorClass : type.kind;
  }
  template <typename Take>
  static Seen with_path(const Take& take, const Path& path, int depth, const char* root);
  Seen take_apart(const KnownType& known, PyObject* object);
  static Seen with_parts(Seen seen, const pybind11::object& parts);
  Seen unwrap(const KnownType& known, PyObject* object) const;

  const CollectionRules rules_;
  pybind11::object target_;       // made when it is asked for
  std::vector<KnownType> types_;  // the few classes that the walk has met
};

}  // namespace tdcopier
