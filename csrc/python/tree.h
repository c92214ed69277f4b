// The treespec: a tree without its leaves, and building one of the same shape from new leaves.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

enum class NodeKind : uint8_t {
  kList,    // number = children
  kTuple,   // number = children
  kDict,    // number = children; their keys are the next ones of the spec, each before its child
  kCustom,  // number = children; the next keys of the spec are its unflatten and its context
  kLeaf,    // number = index in the leaf table of its group
  kReady,   // number = index of the value itself: opaque, reused, or what `Tensor.to` returned
};

// The tensors of all leaves. Each is taken once, about in the order of their indices.
class LeafTensors {
 public:
  virtual PyObject* take(uint32_t group, uint32_t leaf) = 0;  // a new reference; null: an error

 protected:
  ~LeafTensors() = default;
};

// Nodes in the order of the walk, parents before children; keys in the same order.
// GIL: held for every member, the destructor included.
class TreeSpec {
 public:
  struct Node {
    NodeKind kind;
    uint16_t group;  // of a leaf: which of the tree's groups of sources it is in
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
    nodes_.push_back({kind, 0, static_cast<uint32_t>(number)});
  }
  size_t nodes() const { return nodes_.size(); }
  const Node& node(size_t index) const { return nodes_[index]; }
  // Makes of a node, whatever it was, a leaf of the table or a ready value.
  void set_leaf(size_t node, size_t group, size_t leaf);
  size_t set_ready(size_t node, PyObject* value);  // takes over a reference; the value's index

  void add_key(PyObject* key);                                    // takes a reference of its own
  PyObject* value(size_t index) const { return values_[index]; }  // borrowed
  void replace_value(size_t index, pybind11::object value);

  // New containers of the same types. Takes each leaf. Runs Python code where a container is a
  // custom one.
  pybind11::object unflatten(LeafTensors& leaves) const;

  void clear();
  int traverse(visitproc visit, void* arg) const;  // for the garbage collector

 private:
  void swap(TreeSpec& other) noexcept;

  RecycledVector<Node> nodes_;
  RecycledVector<PyObject*> keys_;    // owned
  RecycledVector<PyObject*> values_;  // owned
};

}  // namespace tdcopier
