// What the C++ code calls in tdcopier's Python code: the one place where it knows names of it.
#pragma once

#include <pybind11/pybind11.h>

namespace tdcopier {

// `tdcopier/_hooks.py` registers them. All are functions, but for Refused, a class of exceptions.
struct Hooks {
  pybind11::object rule_of;
  pybind11::object Refused;
  pybind11::object level_of;
  pybind11::object plain_parts;
  pybind11::object as_tensor;
  pybind11::object table_as_tensor;
  pybind11::object may_hold_tensors;
  pybind11::object is_to_be_told;
  pybind11::object warn_of_unknown;
  pybind11::object refuse_unknown;
  pybind11::object refuse_root;
  pybind11::object tell_of_attributes;
  pybind11::object is_plain_class;
  pybind11::object mismatch;
  pybind11::object differ;
  pybind11::object replacements;
  pybind11::object arrived;
  pybind11::object stats_of;
  // packed_form(unflatten, context, number of children): the (module, class name, value) of a
  // container that can be rebuilt without a pickle, or None. from_packed_form(module, name, value,
  // number of children, may import) returns (class, unflatten, context), or raises ValueError.
  // are_current([(module, name, class)]) tells whether the names still mean these classes.
  pybind11::object packed_form;
  pybind11::object from_packed_form;
  pybind11::object are_current;
  // dump_values(values, path_of, device) returns (bytes, plain tensors); load_values(bytes, plain
  // tensors) the values.
  pybind11::object dump_values;
  pybind11::object load_values;
  pybind11::object refuse_pickle;  // (path, bytes): raises ValueError, and unpickles nothing
};

// Returns the registered hooks. GIL: held, as for all uses. Requires: set_hooks() has been called.
const Hooks& hooks();

// Registers all hooks, by name. Called once, when tdcopier is imported. Throws: TypeError if one is
// missing, or there is another one.
void set_hooks(const pybind11::kwargs& named);

}  // namespace tdcopier
