// What is said of a leaf, or of where it goes, that cannot be copied so.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>

#include "engine/leaf.h"
#include "python/pair_overlap.h"
#include "python/pair_walk.h"

namespace tdcopier {

// Errors that name leaves by their paths. `number` is that of the pair in the walk; `tree` says
// which of the two is meant, "source" or "destination". GIL: held.
class PairMistakes {
 public:
  PairMistakes(pybind11::handle source, pybind11::handle destination, PairNames names = {})
      : source_(source), destination_(destination), names_(names) {}

  [[noreturn]] void refuse(size_t number, const char* tree, const std::string& why) const;
  [[noreturn]] void refuse_both(size_t number, const std::string& source,
                                const std::string& destination) const;
  [[noreturn]] void refuse_shapes(size_t number, at::IntArrayRef source,
                                  at::IntArrayRef destination) const;
  [[noreturn]] void refuse_dtypes(size_t number, c10::ScalarType source,
                                  c10::ScalarType destination) const;
  [[noreturn]] void refuse_sharing(const PairEnd& first, const PairEnd& second) const;

  // May this destination be written in place?
  void check_writable(size_t number, const at::Tensor& tensor) const;
  // Does a tensor reach beyond its storage?
  void check_storage(size_t number, const PlainTensor& plain, const at::Tensor& tensor,
                     const char* tree) const;

 private:
  std::string path(size_t number, const char* tree) const;

  const pybind11::handle source_;
  const pybind11::handle destination_;
  const PairNames names_;
};

}  // namespace tdcopier
