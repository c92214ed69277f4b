// Classifies numpy arrays for the walk, and adds plain ones to a leaf table without making a
// tensor, also read-only ones. tdcopier/_containers/arrays.py converts others, such as byte-swapped
// ones.
#pragma once

#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>

#include <string>

#include "engine/leaves/leaf.h"

namespace tdcopier {

enum class ArrayKind {
  kOpaque,         // objects, strings, dates, records, masked arrays: no tensor can hold them
  kUnknownNumber,  // numbers of a type that torch lacks, or cannot take from numpy
  kConvertible,
};

// Looks up numpy's types if numpy is loaded; otherwise no value can be an array. Call before a
// walk.
void load_numpy_types();

// Returns whether the type is numpy's ndarray or a subclass. Like the next four functions, runs no
// Python code.
bool is_array_type(PyTypeObject* type);

ArrayKind classify_array(PyObject* array);

// Returns whether the array's bytes can be read as elements of the torch dtype, which excludes
// other byte orders. Requires: kConvertible.
bool is_readable_array(PyObject* array);

// Returns whether the array is a np.memmap.
bool is_mapped_array(PyObject* array);

// Adds the array to the table as a leaf. Requires: is_readable_array().
void add_array_leaf(PyObject* array, LeafTable& leaves);

// An array's memory and its layout.
struct ArrayMemory {
  std::byte* data;  // the first element
  bool writeable;
  bool dense;  // known to be contiguous, in C or Fortran order
  c10::ScalarType dtype;
  c10::DimVector sizes;
  c10::DimVector strides_bytes;
};

// Requires: is_readable_array().
ArrayMemory memory_of_array(PyObject* array);

// Returns a CPU tensor with the values of any convertible array. It shares the array's memory
// where torch can use it. `is_result`: torch warns of a read-only array. Runs Python code.
pybind11::object tensor_from_array(PyObject* array, bool is_result = false);

std::string array_dtype_name(PyObject* array);

}  // namespace tdcopier
