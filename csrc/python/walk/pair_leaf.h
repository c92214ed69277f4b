// Reads the memory and layout of one leaf of a pair.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/leaves/destination.h"
#include "python/walk/row_leaves.h"

namespace tdcopier {

// The memory and layout of a leaf whose bytes the engine may read or write itself.
struct PlainLeaf {
  c10::Device device;
  std::byte* data;            // the first element
  c10::StorageImpl* storage;  // null for an array
  c10::ScalarType dtype;
  c10::DimVector sizes;
  c10::DimVector strides_bytes;
  bool dense;                       // no gaps and no repeats, in any order of dimensions
  std::optional<RowTable> table{};  // set if only rows are moved

  uint64_t element_bytes() const { return c10::elementSize(dtype); }
  uint64_t bytes() const {
    return static_cast<uint64_t>(c10::multiply_integers(sizes)) * element_bytes();
  }
  // Returns whether these are its strides, in all dimensions whose size is not 1.
  bool has_steps(at::IntArrayRef others_bytes) const;
  // Devices need aligned addresses because they read and write whole elements.
  bool is_aligned() const {
    return device.is_cpu() || reinterpret_cast<uintptr_t>(data) % element_bytes() == 0;
  }
};

// Reads the leaves of one call. Remembers what it learns about their classes and devices.
class PlainLeafReader {
 public:
  // Returns the path of the leaf that is being read, for messages.
  using Path = std::function<std::string(bool written)>;

  PlainLeafReader(TablesOfPairs tables, Path path) : tables_(tables), path_(std::move(path)) {}

  // Returns nullopt for a leaf that is not plain, which is then delegated to torch. GIL: held.
  // Throws: as sort_pairs().
  std::optional<PlainLeaf> read(PyObject* leaf, bool written);

 private:
  std::optional<PlainLeaf> read_tensor(const at::Tensor& tensor, bool written);
  bool is_plain_class(PyObject* object);
  std::optional<c10::DispatchKeySet> keys_of(c10::Device device);

  const TablesOfPairs tables_;
  const Path path_;
  std::vector<std::pair<PyTypeObject*, bool>> classes_;
  std::vector<std::pair<c10::Device, std::optional<c10::DispatchKeySet>>> keys_;
};

}  // namespace tdcopier
