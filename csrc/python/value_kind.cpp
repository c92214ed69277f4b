// Classes are looked up in `tdcopier._containers`, once per walk.
#include "python/value_kind.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "python/array_leaf.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

PathStep::Kind step_kind(const std::string& name) {
  if (name == "key") return PathStep::Kind::kKey;
  return name == "attribute" ? PathStep::Kind::kAttribute : PathStep::Kind::kIndex;
}

// Never imports the module: there is no value of the class before, and it may be half loaded.
bool is_class(const py::object& type, const char* module_name, const char* name) {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), module_name);
  return module != nullptr && py::getattr(module, name, py::none()).is(type);
}

KnownType look_up(py::object type) {
  const auto index = PathStep::Kind::kIndex;
  if (PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()),
                       reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0) {
    if (is_class(type, "tensordict.memmap", "MemoryMappedTensor")) {
      return {std::move(type), ValueKind::kMapped, {}, {}, index};
    }
    if (!is_class(type, "torch.nested._internal.nested_tensor", "NestedTensor")) {
      return {std::move(type), ValueKind::kDelegated, {}, {}, index};
    }
  }
  if (is_array_type(reinterpret_cast<PyTypeObject*>(type.ptr()))) {
    return {std::move(type), ValueKind::kArray, {}, {}, index};
  }
  const py::object rule = py::module_::import("tdcopier._containers").attr("rule_of")(type);
  if (rule.is_none()) return {std::move(type), ValueKind::kOpaque, {}, {}, index};
  if (PyUnicode_Check(rule.ptr())) return {std::move(type), ValueKind::kDelegated, {}, {}, index};
  const bool by_target = rule.attr("by_target").cast<bool>();
  return {std::move(type), by_target ? ValueKind::kCollection : ValueKind::kContainer,
          rule.attr("flatten"), rule.attr("unflatten"),
          step_kind(rule.attr("names").cast<std::string>())};
}

}  // namespace

const KnownType& KnownTypes::find(PyTypeObject* type) {
  for (size_t i = 0; i < types_.size(); ++i) {
    if (is(types_[i], type)) {
      last_ = i;
      return types_[i];
    }
  }
  types_.push_back(look_up(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type))));
  last_ = types_.size() - 1;
  return types_.back();
}

}  // namespace tdcopier
