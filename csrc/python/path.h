// How a value is reached from the root, for messages.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace tdcopier {

// One step from a container to its child.
struct PathStep {
  // A nested key is one or more steps, in a tuple if they are not one; none says nothing.
  enum class Kind : uint8_t { kIndex, kKey, kNestedKey, kAttribute };
  Kind kind;
  PyObject* name;  // borrowed: the key, or the attribute's name; null for an index
  Py_ssize_t index;

  // "[3]", "['boxes']", "['agents', 'reward']", ".boxes" or "". Runs the key's own repr.
  std::string text() const;
};

}  // namespace tdcopier
