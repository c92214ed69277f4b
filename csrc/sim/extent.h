// The bytes that a strided tensor has in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tdcopier::sim {

// Immutable; refers to memory and owns none.
class Extent {
 public:
  Extent(const void* data, std::size_t bytes);
  explicit Extent(const at::Tensor& tensor);  // of at least one element

  std::uintptr_t begin() const { return begin_; }
  std::uintptr_t end() const { return begin_ + span(0); }

  // Whether they have a byte in common. False where both have so many gaps that it is not worth
  // finding out.
  bool overlaps(const Extent& other) const;
  // Whether all bytes of the other are its own. False where that is not obvious.
  bool contains(const Extent& other) const;

  // Reads the memory.
  std::uint64_t checksum() const;

 private:
  struct Dim {
    std::uintptr_t count;
    std::uintptr_t stride;  // bytes
    std::uintptr_t span;    // from the first byte of the first to the last of the last
    bool operator==(const Dim&) const = default;
  };

  std::uintptr_t span(std::size_t dim) const { return dim < dims_.size() ? dims_[dim].span : run_; }
  bool meets(std::size_t dim, std::uintptr_t base, std::uintptr_t low, std::uintptr_t high) const;
  template <typename Visit>
  bool any_run(std::size_t dim, std::uintptr_t base, const Visit& visit) const;

  std::uintptr_t begin_;
  std::uintptr_t run_;       // bytes without a gap
  std::uintptr_t runs_ = 1;  // how many
  std::vector<Dim> dims_;    // of the runs; the largest stride first
};

}  // namespace tdcopier::sim
