// The bytes that a strided tensor occupies in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tdcopier::sim {

// Immutable. Refers to memory, and owns none.
class Extent {
 public:
  Extent(const void* data, std::size_t bytes);
  explicit Extent(const at::Tensor& tensor);  // with at least one element

  std::uintptr_t begin() const { return begin_; }
  std::uintptr_t end() const { return begin_ + span(0); }

  // Returns whether the extents share a byte; false if both have too many gaps to compare.
  bool overlaps(const Extent& other) const;
  // Returns whether this extent has all bytes of the other; false unless that is obvious.
  bool contains(const Extent& other) const;

  // Returns a checksum of the bytes, which it reads.
  std::uint64_t checksum() const;

 private:
  struct Dim {
    std::uintptr_t count;
    std::uintptr_t stride;  // bytes
    std::uintptr_t span;    // bytes from the beginning of the first part to the end of the last
    bool operator==(const Dim&) const = default;
  };

  std::uintptr_t span(std::size_t dim) const { return dim < dims_.size() ? dims_[dim].span : run_; }
  bool meets(std::size_t dim, std::uintptr_t base, std::uintptr_t low, std::uintptr_t high) const;
  template <typename Visit>
  bool any_run(std::size_t dim, std::uintptr_t base, const Visit& visit) const;

  std::uintptr_t begin_;
  std::uintptr_t run_;       // contiguous bytes
  std::uintptr_t runs_ = 1;  // number of runs
  std::vector<Dim> dims_;    // of the runs, largest stride first
};

}  // namespace tdcopier::sim
