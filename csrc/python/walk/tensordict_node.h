// The attributes of an exact `TensorDict`, and of a tensorclass around one, read and written
// without Python code. `tdcopier/tensordict/_nodes.py` checks that this version of tensordict has
// just these; otherwise the walk leaves TensorDicts to `_walk.py`.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace tdcopier {

// Owns references: code of an entry's class may change the TensorDict during the walk.
struct TensorDictNode {
  pybind11::object entries;     // a dict
  pybind11::object batch_size;  // a torch.Size
  pybind11::object names;       // a list, or None
  std::optional<c10::Device> device;
  bool is_locked = false;
  bool is_consolidated = false;
};

// Returns nullopt if an attribute is missing or of another type. GIL: held.
std::optional<TensorDictNode> read_tensordict(PyObject* value);

// Owns references, as TensorDictNode.
struct TensorClassNode {
  pybind11::object tensordict;
  pybind11::object others;  // a dict of the fields that are not in the TensorDict
};

// Returns nullopt if an attribute is missing. Copies the other fields, `with_none`: also those that
// are None. GIL: held.
std::optional<TensorClassNode> read_tensorclass(PyObject* value, bool with_none);

// Makes an instance of the tensorclass `type` around a TensorDict. Runs `__new__` of the class.
// GIL: held. Throws: py::error_already_set.
pybind11::object make_tensorclass(pybind11::handle type, pybind11::handle tensordict,
                                  pybind11::handle others);

// Makes an instance of `type`, an exact TensorDict, that owns `entries`; they must fit the batch
// size and be on the device. Copies the names. GIL: held.
// Throws: py::error_already_set.
pybind11::object make_tensordict(pybind11::handle type, pybind11::object entries,
                                 pybind11::handle batch_size, pybind11::handle names,
                                 pybind11::handle device);

}  // namespace tdcopier
