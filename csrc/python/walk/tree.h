// The treespec: a tree without its leaves, from which a tree of the same structure can be built
// with new leaves.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

enum class NodeKind : uint8_t {
  kList,   // number = children
  kTuple,  // number = children
  kDict,   // number = children; the spec has a key for each, before the keys of that child
  // For example a named tuple: its rule is in tdcopier/_containers, and registry.py chooses it.
  // number = children; the spec's next two keys are its unflatten and its context
  kCustom,
  // number = entries; the spec's next keys are class, batch size, names, device and whether to lock
  // it, and a key for each entry as in kDict
  kTensorDict,
  kTensorClass,  // number = 1, its TensorDict; the next two keys are its class and other fields
  kLeaf,         // number = index in the leaf table of its group
  kReady,        // number = index of the value itself: opaque, reused, or what `Tensor.to` returned
};

// Supplies the tensors of all leaves. Each is taken once, roughly in the order of their indices.
class LeafTensors {
 public:
  virtual PyObject* take(uint32_t group, uint32_t leaf) = 0;  // a new reference; null: an error

 protected:
  ~LeafTensors() = default;
};

// A tree without its leaves: nodes in the order of the walk, parents before children, and keys in
// the same order. GIL: held for every member, including the destructor.
class TreeSpec {
 public:
  struct Node {
    NodeKind kind;
    uint16_t group;  // for a leaf: index of its source group
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
  // Turns any node into a leaf of the table, or into a ready value.
  void set_leaf(size_t node, size_t group, size_t leaf);
  size_t set_ready(size_t node, PyObject* value);  // takes over a reference; returns its index

  void add_key(PyObject* key);  // adds a reference
  const RecycledVector<PyObject*>& keys() const { return keys_; }
  const RecycledVector<PyObject*>& values() const { return values_; }
  PyObject* value(size_t index) const { return values_[index]; }  // borrowed
  void replace_value(size_t index, pybind11::object value);
  void replace_key(size_t index, pybind11::object key);

  // Adds all nodes of another spec, with `new_key` in place of a key. Its leaves keep their
  // numbers.
  void append(const TreeSpec& other, PyObject* key, PyObject* new_key);

  // Builds new containers of the same types with the given leaves. Runs Python code for custom
  // containers.
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
