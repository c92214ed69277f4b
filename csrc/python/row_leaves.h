// What a walk does with a leaf of which rows are to be read.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/row_index.h"
#include "engine/leaf.h"
#include "python/flatten.h"

namespace tdcopier {

// How Python says which rows, and what it does with what the engine cannot read.
struct RowRequest {
  RowIndex index;
  bool counted = false;       // numbers are in range and none is negative
  std::vector<int64_t> lead;  // sizes of the dimensions that count rows; empty: the first leaf's
  // Of a gather:
  bool adjoining = false;      // tables whose rows have gaps are for Python too
  pybind11::object read{};     // read(leaf) -> its rows, or what moves as they are
  pybind11::object flatten{};  // of collections, as KnownType has them
  pybind11::object unflatten{};
};

// Of a RowIndex of tdcopier/_row_request.py, without readers. Copies the numbers.
RowRequest row_request_of(pybind11::handle rows);

// GIL: held for every member.
class RowLeaves {
 public:
  // Throws IndexError where a row is out of range, if that can be known.
  explicit RowLeaves(RowRequest request);

  // What is wrong with a leaf as a table, to follow its path. The first table says how many rows
  // there are, if nobody has. Throws IndexError as the constructor does.
  std::optional<std::string> mistake_in(const at::Tensor& table);
  // Which rows; null before there was a table.
  const std::shared_ptr<const RowIndex>& index() const { return index_; }
  // A row as the caller counts it: "5", or "(1, 2)" of two dimensions. Requires: index().
  std::string named(int64_t row) const;
  // Adds the rows of a host tensor as a leaf, if the engine can read them.
  Packable add(LeafTable& leaves, const at::Tensor& table);
  // The last leaf of the group's table lies in a mapped file.
  void note_mapped(SourceGroup& group) const;
  // The rows of any leaf, by its own code, counted.
  pybind11::object read(PyObject* leaf);

  const pybind11::object& flatten() const { return request_.flatten; }
  const pybind11::object& unflatten() const { return request_.unflatten; }
  // How many leaves were left to their own code.
  uint32_t left() const { return left_; }

 private:
  void count_rows();  // once it is known how many there are

  RowRequest request_;
  std::shared_ptr<const RowIndex> index_;  // set by count_rows()
  uint32_t left_ = 0;
};

}  // namespace tdcopier
