// Decides how to treat each tensor and array that a walk has found: a leaf of its device's table,
// delegated, or reused. A tensor that is in the tree twice is two leaves, as are two views of one
// storage: both are copied, and the results share no elements. look_at() in engine/leaves/leaf.h
// decides by keys, names and gradients which tensors are plain.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "base/recycled.h"
#include "engine/leaves/mapped_leaves.h"
#include "engine/leaves/pinned_leaves.h"
#include "python/walk/flatten.h"
#include "python/walk/leaves_for_kernel.h"

namespace tdcopier {

class RowLeaves;

// Collects tensors and arrays during a walk, and sorts them at its end: the code of a class in the
// tree may resize leaves that were found before. GIL: held for every member.
class LeafSorter {
 public:
  // `altered`: a torch mode is active. `delegates_all`: every leaf is delegated, for a mode or for
  // messages. `rows`: selects rows of the tables among the leaves, or null. `packs`: leaves that
  // are on the target are moved too.
  LeafSorter(c10::Device target, bool altered, bool delegates_all, RowLeaves* rows, bool packs);
  ~LeafSorter();
  LeafSorter(const LeafSorter&) = delete;
  LeafSorter& operator=(const LeafSorter&) = delete;

  // These take over a reference. `node`: of the tree's spec.
  void add_tensor(PyObject* tensor, size_t node, bool is_table, bool is_mapped) {
    tensors_.push_back({tensor, node, is_table, is_mapped});
  }
  void add_array(PyObject* array, size_t node) { arrays_.push_back({array, node, false, false}); }
  // Its nodes are in the spec from `first_node` on.
  void add_parcel(PyObject* parcel, size_t first_node) {
    parcels_.push_back({parcel, first_node, false, false});
  }

  // Whether leaves in host memory go to the target by the engine.
  bool moves_from_host() const { return moves_from_host_; }
  // Whether leaves on the device do, unless it is the target.
  bool is_moved_from(c10::Device device) const;

  // Moves all that was added into the tree. `data`: the root of the walk, for messages. Throws:
  // ValueError with the path of a tensor that cannot be read; IndexError; any error of the code
  // that reads rows.
  void sort(FlatTree& flat, PyObject* data);

 private:
  struct Found {
    PyObject* object;  // owned until it is sorted out: a class's own code may drop other references
    size_t node;
    bool is_table;   // its rows have not been read yet
    bool is_mapped;  // a tensor that was made from a np.memmap
  };

  void sort_parcel(Found& found);
  void sort_tensors();
  void sort_table(PyObject* object, size_t node, bool is_mapped);
  void sort_tensor(PyObject* object, size_t node);
  void sort_for_kernel();
  void add_leaf(PyObject* object, size_t node, size_t group);
  [[noreturn]] void refuse_short_storage(const at::Tensor& tensor, size_t node) const;
  [[noreturn]] void refuse(size_t node, const std::string& why) const;
  size_t group_of(c10::Device device, bool in_place = false);
  void set_leaf(PyObject* object, size_t node, size_t group);

  const c10::Device target_;
  const bool altered_;
  const bool delegates_all_;
  const bool packs_;
  const bool moves_from_host_;
  RowLeaves* const rows_;
  FlatTree* flat_ = nullptr;  // set by sort()
  PyObject* data_ = nullptr;  // borrowed
  MappedFiles mapped_files_;
  PinnedLeaves pinned_;
  LeavesForKernel for_kernel_;
  size_t last_group_ = 0;
  RecycledVector<Found> tensors_;  // in the order of the walk
  RecycledVector<Found> arrays_;
  std::vector<Found> parcels_;
  std::vector<Found> taken_;  // by for_kernel_
};

}  // namespace tdcopier
