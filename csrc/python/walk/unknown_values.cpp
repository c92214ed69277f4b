// Asks tdcopier._containers.unknown about each class of opaque values once (about each value, if
// the class may hold tensors), and then walks the tree again for the paths of those that it
// reports. tdcopier._containers.beside looks at attributes that are no children.
#include "python/walk/unknown_values.h"

#include <torch/csrc/Device.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "python/runtime/hooks.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/value_kind.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Returns, by ready value of the spec, whether it is opaque.
std::vector<bool> opaque_values(const FlatTree& flat) {
  std::vector<bool> opaque;
  for (size_t i = 0; i < flat.spec.nodes(); ++i) {
    const TreeSpec::Node& node = flat.spec.node(i);
    if (node.kind != NodeKind::kReady) continue;
    opaque.resize(std::max<size_t>(opaque.size(), node.number + 1));
    // A ready tensor is reused or delegated.
    opaque[node.number] = !is_tensor(flat.spec.value(node.number));
  }
  for (const Delegated& leaf : flat.delegated) opaque[leaf.value] = false;
  return opaque;
}

bool has_custom(const TreeSpec& spec) {
  for (size_t i = 0; i < spec.nodes(); ++i) {
    if (spec.node(i).kind == NodeKind::kCustom) return true;
  }
  return false;
}

void find_opaque(const FlatTree& flat, py::handle data, c10::Device target, bool warns) {
  const std::vector<bool> opaque = opaque_values(flat);
  std::vector<PyTypeObject*> seen;  // alive as long as the values in the spec are
  for (size_t i = 0; i < flat.spec.nodes(); ++i) {
    const TreeSpec::Node& node = flat.spec.node(i);
    if (node.kind != NodeKind::kReady || !opaque[node.number]) continue;
    const auto value = py::reinterpret_borrow<py::object>(flat.spec.value(node.number));
    PyTypeObject* const type = Py_TYPE(value.ptr());
    if (ValueLooks::is_plain_opaque(type)) continue;
    if (std::find(seen.begin(), seen.end(), type) != seen.end()) continue;
    const py::handle cls(reinterpret_cast<PyObject*>(type));
    if (!hooks().may_hold_tensors(cls).cast<bool>()) seen.push_back(type);
    if (!hooks().is_to_be_told(value, warns).cast<bool>()) continue;
    const std::string path = path_of(data, i, target).value_or("a value in data");
    (warns ? hooks().warn_of_unknown : hooks().refuse_unknown)(path, value);
  }
}

}  // namespace

void find_unknown(const FlatTree& flat, py::handle data, c10::Device target, OnUnknown on_unknown) {
  const bool warns = on_unknown == OnUnknown::kWarn;
  if (flat.opaque != 0) find_opaque(flat, data, target, warns);
  if (on_unknown == OnUnknown::kRefuseRoot || !has_custom(flat.spec)) return;
  const py::object device = py::reinterpret_steal<py::object>(THPDevice_New(target));
  hooks().tell_of_attributes(data, device, warns);
}

}  // namespace tdcopier
