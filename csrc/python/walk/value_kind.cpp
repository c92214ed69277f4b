// Looks up each class in `tdcopier._containers.registry` once per walk; those of tensordict, once.
#include "python/walk/value_kind.h"

#include <torch/csrc/Device.h>

#include <string>
#include <utility>

#include "base/internal_error.h"
#include "python/runtime/array_leaf.h"
#include "python/runtime/hooks.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Returns whether `type` is this class of a loaded module. Never imports the module: before that no
// value of the class exists, and the module may be half loaded.
bool is_class(const py::object& type, const char* module_name, const char* name) {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), module_name);
  return module != nullptr && py::getattr(module, name, py::none()).is(type);
}

py::object none_as_null(py::object object) {
  return object.is_none() ? py::object() : object;
}

// The rules of tensordict's own classes, which a program meets in nearly every walk: asking Python
// for one costs as much as a small copy when the caches are cold. (Tensordict keeps these classes
// alive too.)
struct KeptRules {
  static constexpr size_t kMost = 8;
  std::vector<KnownType> types;
  size_t oldest = 0;
  uint64_t generation = 0;  // increases when rules change
};

// Never freed: the rules may outlive the interpreter. GIL: held.
KeptRules& kept_rules() {
  static auto& kept = *new KeptRules;
  return kept;
}

// `generation`: when the look-up began, which lets other threads in.
void keep_rule(KnownType known, uint64_t generation) {
  KeptRules& kept = kept_rules();
  if ((!known.flatten_entry && !known.is_tensorclass) || kept.generation != generation) return;
  if (kept.types.size() < KeptRules::kMost) {
    kept.types.push_back(std::move(known));
  } else {
    std::swap(kept.types[kept.oldest++ % KeptRules::kMost], known);
  }
}

KnownType look_up(py::object type) {
  load_numpy_types();
  const bool is_tensor = PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()),
                                          reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
  if (is_tensor && is_class(type, "tensordict.memmap", "MemoryMappedTensor")) {
    return {std::move(type), ValueKind::kMapped};
  }
  if (is_array_type(reinterpret_cast<PyTypeObject*>(type.ptr()))) {
    return {std::move(type), ValueKind::kArray};
  }
  const py::object rule = hooks().rule_of(type);
  if (rule.is_none()) {
    return {std::move(type), is_tensor ? ValueKind::kDelegated : ValueKind::kOpaque};
  }
  if (py::isinstance<WhyDelegated>(rule)) {
    const bool is_object = rule.cast<WhyDelegated>() == WhyDelegated::kObject;
    return {std::move(type), is_object ? ValueKind::kObject : ValueKind::kDelegated};
  }
  const py::object flatten = rule.attr("flatten");
  const py::object unflatten = rule.attr("unflatten");
  if (rule.attr("wraps").cast<bool>()) {
    return {std::move(type), ValueKind::kWrapped, flatten, unflatten};
  }
  const bool by_target = rule.attr("by_target").cast<bool>();
  const bool is_object = rule.attr("own_to").cast<bool>();
  const py::object keeps_none = rule.attr("keeps_none");
  return {std::move(type),
          by_target ? ValueKind::kCollection : ValueKind::kContainer,
          flatten,
          unflatten,
          rule.attr("step").cast<PathStep::Kind>(),
          is_object ? ValueKind::kObject : ValueKind::kDelegated,
          none_as_null(rule.attr("flatten_entry")),
          !keeps_none.is_none(),
          keeps_none.is(py::handle(Py_True))};
}

}  // namespace

void forget_rules() {
  KeptRules& kept = kept_rules();
  ++kept.generation;
  const std::vector<KnownType> freed = std::exchange(kept.types, {});
}

ValueLooks::ValueLooks(CollectionRules rules) : rules_(std::move(rules)) {}

// Puts the path before the message of a refusal by Python code.
template <typename Take>
Seen ValueLooks::with_path(const Take& take, const Path& path, int depth, const char* root) {
  try {
    return take();
  } catch (py::error_already_set& error) {
    if (!error.matches(hooks().Refused)) throw;
    throw py::type_error(root + path.text(depth) + " " + std::string(py::str(error.value())));
  }
}

Seen ValueLooks::look(PyObject* object, const Path& path, int depth, const char* root) {
  const KnownType& type = known(Py_TYPE(object));
  const ValueKind kind = kind_of(type);
  switch (kind) {
    case ValueKind::kOpaque:
    case ValueKind::kDelegated:
    case ValueKind::kMapped:
    case ValueKind::kObject:
    case ValueKind::kTensorDict:
    case ValueKind::kTensorClass:
      return {kind};
    case ValueKind::kWrapped:
      return unwrap(type, object);
    case ValueKind::kArray: {
      const ArrayKind array = classify_array(object);
      if (array == ArrayKind::kOpaque) return {ValueKind::kOpaque};
      if (array == ArrayKind::kConvertible) return {ValueKind::kArray};
      const std::string dtype = array_dtype_name(object);  // before Python code can run
      throw py::type_error(root + path.text(depth) + " is a numpy array of dtype " + dtype +
                           ", which torch cannot take: convert it with .astype(...) first");
    }
    case ValueKind::kCollection:
    case ValueKind::kContainer:
      break;
  }
  return with_path([&] { return take_apart(type, object); }, path, depth, root);
}

Seen ValueLooks::look_at_level(PyObject* collection, const Path& path, int depth,
                               const char* root) {
  const auto take = [&] {
    const py::tuple level = hooks().level_of(py::handle(collection));
    Seen seen{ValueKind::kContainer, PathStep::Kind::kNestedKey};
    if (level[0].cast<bool>()) {
      seen.children = level[1];
    } else {
      seen.kind = ValueKind::kOpaque;
      seen.context = level[1];
    }
    return seen;
  };
  return with_path(take, path, depth, root);
}

// Copies all it needs from `known` before Python code runs, which may move `known` and change the
// object's class.
Seen ValueLooks::take_apart(const KnownType& known, PyObject* object) {
  const bool collection = known.kind == ValueKind::kCollection;
  const ValueKind left_as = known.left_as;
  const bool of_tensors = collection && left_as == ValueKind::kDelegated;
  if (of_tensors && rules_.left) return {left_as};
  const bool reads_rows = static_cast<bool>(rules_.flatten);
  const bool ruled = of_tensors && reads_rows;
  const py::object flatten = ruled ? rules_.flatten : known.flatten;
  Seen seen{of_tensors ? ValueKind::kCollection : ValueKind::kContainer, known.step};
  seen.unflatten = ruled ? rules_.unflatten : known.unflatten;
  const bool anywhere = reads_rows && !of_tensors;  // the `.to` of an object reads no rows
  const py::object parts =
      collection ? flatten(py::handle(object), anywhere ? py::none() : target(), rules_.named)
                 : flatten(py::handle(object));
  if (collection && parts.is_none()) return {left_as};
  return with_parts(std::move(seen), parts);
}

Seen ValueLooks::look_into(PyTypeObject* tensordict, PyObject* entry, py::handle batch_size) {
  const KnownType& known = this->known(tensordict);
  const py::object flatten = known.flatten_entry;
  Seen seen{ValueKind::kCollection, known.step};
  seen.unflatten = known.unflatten;
  const py::object parts = flatten(py::handle(entry), target(), rules_.named, batch_size);
  if (parts.is_none()) return {ValueKind::kDelegated};
  return with_parts(std::move(seen), parts);
}

const py::object& ValueLooks::target() {
  if (!target_) target_ = rules_.target_object;
  if (!target_) {
    target_ = rules_.target ? py::reinterpret_steal<py::object>(THPDevice_New(*rules_.target))
                            : py::none();
  }
  return target_;
}

Seen ValueLooks::with_parts(Seen seen, const py::object& parts) {
  check_invariant(PyTuple_Check(parts.ptr()) && PyTuple_GET_SIZE(parts.ptr()) == 3 &&
                      PyList_Check(PyTuple_GET_ITEM(parts.ptr(), 0)),
                  "a container is taken apart into a list, a context and names");
  const py::tuple three = parts;
  seen.children = three[0];
  seen.context = three[1];
  if (three[2].is_none()) {
    seen.step = PathStep::Kind::kIndex;
    return seen;
  }
  seen.names = three[2];
  check_invariant(py::len(seen.children) == py::len(seen.names),
                  "each child of a container has a name, or none has");
  return seen;
}

// A walk over existing memory reads such tensors as they are.
Seen ValueLooks::unwrap(const KnownType& known, PyObject* object) const {
  if (rules_.left || !rules_.target) return {ValueKind::kDelegated};
  const py::object flatten = known.flatten;
  Seen seen{ValueKind::kWrapped};
  seen.unflatten = known.unflatten;
  seen.context = flatten(py::handle(object));
  return seen;
}

const KnownType& ValueLooks::known(PyTypeObject* type) {
  const py::handle wanted(reinterpret_cast<PyObject*>(type));
  for (const KnownType& each : types_) {
    if (each.type.is(wanted)) return each;
  }
  for (const KnownType& each : kept_rules().types) {
    if (each.type.is(wanted)) return types_.emplace_back(each);
  }
  const uint64_t generation = kept_rules().generation;
  types_.push_back(look_up(py::reinterpret_borrow<py::object>(wanted)));
  keep_rule(types_.back(), generation);
  return types_.back();
}

}  // namespace tdcopier
