// How a value is reached from the root, for messages.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>

namespace tdcopier {

// Containers nested deeper than this raise RecursionError, cycles included.
inline constexpr int kMaxDepth = 1000;

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

// The steps from the root to where a walk is.
class Path {
 public:
  // Where does the step from depth `depth` lead?
  PathStep& operator[](int depth) { return steps_[depth]; }
  // How a value at this depth is reached, such as "['boxes'][3]".
  std::string text(int depth) const;
  // Throws RecursionError, where `root` is what the caller calls the tree.
  void check_depth(int depth, const char* root) const {
    if (depth >= kMaxDepth) refuse_depth(root);
  }

 private:
  [[noreturn]] void refuse_depth(const char* root) const;

  std::array<PathStep, kMaxDepth> steps_;
};

}  // namespace tdcopier
