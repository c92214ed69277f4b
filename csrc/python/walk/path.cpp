// Formats steps in Python syntax.
#include "python/walk/path.h"

namespace py = pybind11;

namespace tdcopier {

std::string PathStep::text() const {
  switch (kind) {
    case Kind::kIndex:
      return "[" + std::to_string(index) + "]";
    case Kind::kNestedKey:
      if (PyTuple_CheckExact(name) && PyTuple_GET_SIZE(name) == 0) return "";
      [[fallthrough]];
    case Kind::kKey:
      return "[" + std::string(py::repr(name)) + "]";
    case Kind::kAttribute:
      return "." + std::string(py::str(name));
  }
  Py_UNREACHABLE();
}

std::string Path::text(int depth) const {
  std::string text;
  for (int i = 0; i < depth; ++i) text += steps_[i].text();
  return text;
}

void Path::refuse_depth(const char* root) const {
  PyErr_Format(
      PyExc_RecursionError,
      "%s is nested more than %d containers deep, from %s%s... on: does it contain itself?", root,
      kMaxDepth, root, text(8).c_str());
  throw py::error_already_set();
}

}  // namespace tdcopier
