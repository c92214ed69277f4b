// How a value is reached from the root, for messages.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace tdcopier {

// One step from a container to its child.
struct PathStep {
  enum class Kind : uint8_t { kIndex, kKey, kAttribute };
  Kind kind;
  PyObject* name;  // borrowed: the key, or the attribute's name; null for an index
  Py_ssize_t index;

  // "[3]", "['boxes']" or ".boxes". Runs the key's own repr.
  std::string text() const;
};

}  // namespace tdcopier
