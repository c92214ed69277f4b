// Steps are written as Python would.
#include "python/path.h"

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

}  // namespace tdcopier
