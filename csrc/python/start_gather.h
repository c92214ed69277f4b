// A copy of rows that are picked by number.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "python/row_leaves.h"
#include "python/start_copy.h"

namespace tdcopier {

// Which rows, as Python has sorted it out.
struct RowNumbers {
  pybind11::handle numbers;  // a host tensor of int64, contiguous, in the shape of the result
  size_t lead;               // how many dimensions count rows, at least 1
  bool counted;              // see RowRequest
  std::vector<int64_t> sizes;
};

// What becomes of leaves that the engine cannot read: see RowRequest.
struct RowReaders {
  bool adjoining = false;
  pybind11::object read;
  pybind11::object flatten;
  pybind11::object unflatten;
};

// Copies the numbers.
RowRequest request_of(RowNumbers rows, RowReaders readers = {});

// Throws as start_copy(), and IndexError where a row is out of range, before any is read.
std::unique_ptr<Handle> start_gather(pybind11::handle storage, RowNumbers rows, RowReaders readers,
                                     pybind11::handle device, const CopyOptions& options);

}  // namespace tdcopier
