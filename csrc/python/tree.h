// A tree without its leaves, and the leaves: the one walk that takes a nested structure apart.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/recycled.h"
#include "engine/leaf.h"
#include "python/sources.h"

namespace tdcopier {

// Containers nested deeper than this raise RecursionError, cycles included.
inline constexpr int kMaxDepth = 1000;

enum class NodeKind : uint8_t {
  kList,   // number = children
  kTuple,  // number = children
  kDict,   // number = children; their keys are the next ones of the spec, each before its child
  kLeaf,   // number = index in the leaf table
  kReady,  // number = index of the value itself: opaque, reused, or what `Tensor.to` returned
};

// Nodes in the order of the walk, parents before children; keys in the same order.
// GIL: held for every member, the destructor included.
class TreeSpec {
 public:
  struct Node {
    NodeKind kind;
    uint32_t number;
  };

  TreeSpec() = default;
  TreeSpec(TreeSpec&& other) noexcept { swap(other); }
  TreeSpec& operator=(TreeSpec&& other) noexcept {
    swap(other);
    return *this;
  }
  ~TreeSpec() { clear(); }

  void reserve(size_t nodes);
  void add(NodeKind kind, size_t number) {
    nodes_.push_back({kind, static_cast<uint32_t>(number)});
  }
  size_t nodes() const { return nodes_.size(); }
  // Makes of a node, whatever it was, a leaf of the table or a ready value.
  void set_leaf(size_t node, size_t leaf);
  size_t set_ready(size_t node,
                   PyObject* value);  // takes a reference of its own; the value's index

  void add_key(PyObject* key);                                    // takes a reference of its own
  PyObject* value(size_t index) const { return values_[index]; }  // borrowed
  void replace_value(size_t index, pybind11::object value);

  // New containers of the same types; `leaf(i)` makes the i-th leaf's tensor.
  pybind11::object unflatten(const std::function<at::Tensor(uint32_t)>& leaf) const;

  void clear();
  int traverse(visitproc visit, void* arg) const;  // for the garbage collector

 private:
  void swap(TreeSpec& other) noexcept;

  RecycledVector<Node> nodes_;
  RecycledVector<PyObject*> keys_;    // owned
  RecycledVector<PyObject*> values_;  // owned
};

struct FlatTree {
  TreeSpec spec;
  LeafTable leaves;                    // what the engine moves
  std::unique_ptr<PySources> sources;  // keeps their memory
  std::vector<size_t> delegated;       // ready values that `Tensor.to` must replace
  uint32_t reused = 0;
  uint32_t opaque = 0;
};

// Throws: RecursionError, TypeError with the leaf's path. Runs no Python code unless it throws.
FlatTree flatten(PyObject* data, c10::Device target, bool engine_transfers);

}  // namespace tdcopier
