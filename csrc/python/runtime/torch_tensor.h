// torch's Python tensors.
//
// torch/csrc/autograd/python_variable.h has these too, but it includes so much that it alone costs
// the compiler seven seconds for each file. torch_tensor.cpp compares the two.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/python_headers.h>

#include <utility>

#include "python/runtime/collector.h"

extern TORCH_PYTHON_API PyObject* THPVariableClass;
extern TORCH_PYTHON_API PyObject* ParameterClass;
TORCH_PYTHON_API PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

namespace tdcopier {

// The Python object of any tensor, also of a subclass.
struct PyTensor {
  PyObject_HEAD at::Tensor tensor;
  PyObject* backward_hooks;
  PyObject* post_accumulate_grad_hooks;
};

// Returns whether this is `torch.Tensor` or `torch.nn.Parameter`, and no other subclass.
inline bool is_plain_tensor_class(const PyTypeObject* type) {
  const auto* object = reinterpret_cast<const PyObject*>(type);
  return object == THPVariableClass || object == ParameterClass;
}

// As `isinstance(object, torch.Tensor)`. May run Python code; throws what that raises.
bool is_tensor(PyObject* object);

// Requires: is_tensor(object).
inline const at::Tensor& tensor_in(PyObject* object) {
  return reinterpret_cast<PyTensor*>(object)->tensor;
}

// Returns a new reference.
inline PyObject* wrap_tensor(at::Tensor tensor) {
  return uncollected([&] { return THPVariable_Wrap(std::move(tensor)); });
}

}  // namespace tdcopier
