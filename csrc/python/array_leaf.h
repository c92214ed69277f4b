// What a numpy array is to the walk, and how a plain one becomes a leaf without a tensor in
// between.
#pragma once

#include <torch/csrc/python_headers.h>

#include <string>

#include "engine/leaf.h"

namespace tdcopier {

enum class ArrayKind {
  kNotAnArray,
  kOpaque,         // objects, strings, dates, records, masked arrays: no tensor can hold them
  kUnknownNumber,  // numbers of a type that torch lacks
  kConvertible,
};

// Before a walk: looks numpy's types up if numpy is loaded. Where it is not there are no arrays.
void load_numpy_types();

// Runs no Python code.
ArrayKind classify_array(PyObject* object);

// Requires kConvertible. False, and nothing added, unless its bytes can be read as they are: native
// byte order and C- or Fortran-contiguous.
bool add_array_leaf(PyObject* array, LeafTable& leaves);

std::string array_dtype_name(PyObject* array);

}  // namespace tdcopier
