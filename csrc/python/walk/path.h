// The path from the root of a tree to a value, for messages.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>

namespace tdcopier {

// Containers nested deeper than this raise RecursionError; so do cycles.
inline constexpr int kMaxDepth = 1000;

// One step from a container to its child.
struct PathStep {
  // A nested key stands for several steps if it is a tuple, and for none if the tuple is empty.
  enum class Kind : uint8_t { kIndex, kKey, kNestedKey, kAttribute };
  Kind kind;
  PyObject* name;  // borrowed: the key, or the attribute's name; null for an index
  Py_ssize_t index;

  // Returns, for example, "[3]", "['boxes']", "['agents', 'reward']", ".boxes" or "". Runs the
  // key's own repr.
  std::string text() const;
};

// The steps from the root to the current position of a walk.
class Path {
 public:
  // The step from depth `depth` to its child.
  PathStep& operator[](int depth) { return steps_[depth]; }
  // Returns the path of the current value at this depth, for example "['boxes'][3]".
  std::string text(int depth) const;
  // Throws RecursionError if `depth` is too large. `root` is the tree's name in the message.
  void check_depth(int depth, const char* root) const {
    if (depth >= kMaxDepth) refuse_depth(root);
  }

 private:
  [[noreturn]] void refuse_depth(const char* root) const;

  std::array<PathStep, kMaxDepth> steps_;
};

}  // namespace tdcopier
