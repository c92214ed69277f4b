// Walks for a copy, for the rows of tables, and for messages.
#include "python/flatten.h"

#include <algorithm>
#include <string>
#include <vector>

#include "python/flattener.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

struct Described {
  std::vector<std::string> paths;  // by node
  FlatTree tree;                   // every leaf delegated
};

Described describe(py::handle data, c10::Device target) {
  Described found;
  found.tree = Flattener(target, {}, &found.paths).run(data.ptr());
  return found;
}

}  // namespace

FlatTree flatten(py::handle data, c10::Device target, const ExpectedTree& expected) {
  return Flattener(target, expected, nullptr).run(data.ptr());
}

FlatTree flatten_tables(py::handle data, c10::Device target, RowLeaves& rows) {
  return Flattener(target, {}, nullptr, &rows).run(data.ptr());
}

std::vector<std::string> paths_of(py::handle data, c10::Device target) {
  return describe(data, target).paths;
}

std::optional<std::string> path_of(py::handle data, size_t node, c10::Device target) {
  try {
    const Described found = describe(data, target);
    if (node < found.paths.size()) return found.paths[node];
  } catch (py::error_already_set&) {  // what is wrong with the leaf matters more
  }
  return std::nullopt;
}

bool is_dict_of_tensors(py::handle object) {
  if (!PyDict_CheckExact(object.ptr())) return false;
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  while (PyDict_Next(object.ptr(), &position, nullptr, &value) != 0) {
    if (!THPVariable_CheckTypeExact(Py_TYPE(value))) return false;
  }
  return true;
}

py::list leaves_with_paths(py::handle data, c10::Device target) {
  Described found = describe(data, target);
  std::sort(found.tree.delegated.begin(), found.tree.delegated.end(),
            [](const Delegated& a, const Delegated& b) { return a.node < b.node; });
  py::list leaves;
  for (const Delegated& leaf : found.tree.delegated) {
    leaves.append(
        py::make_tuple(found.paths[leaf.node], py::handle(found.tree.spec.value(leaf.value))));
  }
  return leaves;
}

}  // namespace tdcopier
