// What the engine knows of a leaf that it moves itself: where its bytes are and what tensor they
// make.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "base/pack_plan.h"
#include "base/recycled.h"

namespace tdcopier {

// A leaf in host memory whose bytes are contiguous, in whatever order of dimensions.
struct Leaf {
  const void* data;
  uint64_t bytes;
  c10::ScalarType dtype;
  uint32_t dims;        // number of dimensions
  uint32_t first_size;  // index of its sizes in LeafTable::extents; its strides follow them
};

// Leaves by index. Sizes and strides lie in one array: the source may be gone when outputs are
// built.
class LeafTable {
 public:
  void reserve(size_t leaves);
  // `data` holds the product of `sizes` elements, contiguous; `strides` are in elements.
  void add(const void* data, c10::ScalarType dtype, std::span<const int64_t> sizes,
           std::span<const int64_t> strides);

  // May the engine read this tensor's bytes itself? Only plain, dense, strided host tensors: no
  // functorch, conj, neg, Python or wrapper keys, no names, no gradient to keep, storage that
  // covers the extent. Then it is added. Whatever else torch has or will have is left to
  // `Tensor.to`: false.
  bool add_if_packable(const at::Tensor& tensor);

  size_t size() const { return leaves_.size(); }
  const Leaf& operator[](size_t i) const { return leaves_[i]; }
  at::IntArrayRef sizes(const Leaf& leaf) const;    // (dims,)
  at::IntArrayRef strides(const Leaf& leaf) const;  // (dims,), in elements
  std::span<const LeafExtent> extents() const { return extents_; }

 private:
  RecycledVector<Leaf> leaves_;
  RecycledVector<LeafExtent> extents_;  // for the pack plan
  RecycledVector<int64_t> shapes_;
};

// Is this thread in a state that changes what `Tensor.to` does (a dispatch mode, a functorch
// transform, functionalization)? Then every leaf is left to it.
bool dispatch_is_altered();

}  // namespace tdcopier
