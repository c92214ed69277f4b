// What a numpy array is to the walk, and how a plain one becomes a leaf without a tensor in
// between.
#pragma once

#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>

#include <string>

#include "engine/leaf.h"

namespace tdcopier {

enum class ArrayKind {
  kOpaque,         // objects, strings, dates, records, masked arrays: no tensor can hold them
  kUnknownNumber,  // numbers of a type that torch lacks, or cannot take from numpy
  kConvertible,
};

// Before a walk: looks numpy's types up if numpy is loaded. Where it is not there are no arrays.
void load_numpy_types();

// Is it numpy's array, or a class made from it? Runs no Python code, as do the next four.
bool is_array_type(PyTypeObject* type);

ArrayKind classify_array(PyObject* array);

// Requires kConvertible. Can its bytes be read as those of torch's dtype? Not in another byte
// order.
bool is_readable_array(PyObject* array);

// Does it lie in a file that numpy has mapped?
bool is_mapped_array(PyObject* array);

// Requires is_readable_array().
void add_array_leaf(PyObject* array, LeafTable& leaves);

// An array's memory and what is in it.
struct ArrayMemory {
  std::byte* data;  // the first element
  bool writeable;
  bool dense;  // its bytes lie together, in whatever order of dimensions; where that is known
  c10::ScalarType dtype;
  c10::DimVector sizes;
  c10::DimVector strides_bytes;
};

// Requires is_readable_array().
ArrayMemory memory_of_array(PyObject* array);

// A CPU tensor with the values of any convertible array: over the same memory where torch can use
// it. Runs Python code.
pybind11::object tensor_from_array(PyObject* array);

std::string array_dtype_name(PyObject* array);

}  // namespace tdcopier
