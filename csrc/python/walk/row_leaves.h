// Selects rows of the leaves of a walk, for gathers and scatters.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/row_index.h"
#include "engine/device/pinned_ranges.h"
#include "engine/leaves/leaf.h"
#include "engine/leaves/mapped_leaves.h"

namespace tdcopier {

// Which rows a call selects, and the Python functions for leaves that the engine cannot read.
struct RowRequest {
  RowIndex index;
  pybind11::object numbers{};  // the tensor of the index
  c10::Device numbers_device() const;
  bool may_be_in_place = true;  // a device may access pinned tables
  bool counted = false;         // all row numbers are known to be in range and not negative
  std::vector<int64_t> lead;    // sizes of the dimensions that count rows; empty: the first leaf's
  // For a gather only:
  bool adjoining = false;      // Python also reads tables whose rows have gaps between them
  pybind11::object read{};     // read(leaf) -> its rows, or a value to move in place of the leaf
  pybind11::object flatten{};  // for collections, as in KnownType
  pybind11::object unflatten{};
};

// Converts a RowIndex of tdcopier/_rows/request.py; the Python functions stay unset.
RowRequest row_request_of(pybind11::handle rows);
// Sets the Python functions from a RowReaders of that file.
void add_readers(RowRequest& request, pybind11::handle readers);

// Adds the selected rows of tables to leaf tables. GIL: held for every member.
class RowLeaves {
 public:
  // Throws IndexError if a row is out of range and the number of rows is already known. Numbers on
  // a device are checked there.
  explicit RowLeaves(RowRequest request);

  // Returns why a leaf cannot be a table, as text that follows its path in a message. The first
  // table sets the number of rows if the request does not. Throws IndexError if a row is out of
  // range.
  std::optional<std::string> mistake_in(const at::Tensor& table);
  // The selected rows; null until the number of rows is known.
  const std::shared_ptr<const RowIndex>& index() const { return index_; }
  // Returns a row number as the caller counts it: "5", or "(1, 2)" in two dimensions. Requires:
  // index().
  std::string named(int64_t row) const;
  // Returns the shape of the selected rows of a table with these sizes. Requires: index().
  c10::DimVector shape_in(at::IntArrayRef table_sizes) const;
  // Returns whether the device can move the rows of a table in place. Requires: mistake_in() has
  // found none.
  InPlace in_place(const at::Tensor& table, c10::Device device);
  // What a table needs, and the call, so that a device can use its own numbers: for messages.
  static std::string needs_for_device();
  // No tables yet. Requires: in_place() has been asked.
  PinnedTables pinned_tables() { return pinned_->tables(); }
  // The tensor of the numbers. If it is on a device, it must be kept alive for it.
  const pybind11::object& numbers() const { return request_.numbers; }
  c10::Device numbers_device() const { return request_.numbers_device(); }
  bool are_numbers_on_device() const { return !numbers_device().is_cpu(); }
  // Adds the selected rows of a host tensor as a leaf, if the engine can read them.
  Packable add(LeafTable& leaves, const at::Tensor& table);
  // Notes that the last leaf of a table is memory-mapped.
  void note_mapped(const LeafTable& leaves, MappedLeaves& mapped) const;
  // Reads the rows of any leaf with its own code, and counts it in left().
  pybind11::object read(PyObject* leaf);

  const pybind11::object& flatten() const { return request_.flatten; }
  const pybind11::object& unflatten() const { return request_.unflatten; }
  // The number of leaves whose rows were read by their own code.
  uint32_t left() const { return left_; }

 private:
  void count_rows();  // checks the row numbers and sets index_. Requires: request_.lead is known.

  RowRequest request_;
  std::shared_ptr<const RowIndex> index_;
  std::optional<PinnedLookup> pinned_{};                 // for that device
  std::optional<std::pair<c10::Device, bool>> mover_{};  // whether that device can move rows
  uint32_t left_ = 0;
};

// Which end of each pair is a table, of which rows are selected.
struct TablesOfPairs {
  RowLeaves* rows = nullptr;  // null: neither
  bool are_sources = false;
};

}  // namespace tdcopier
