// Checks the declarations of Python tensors against torch's own.
#include "python/runtime/torch_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <type_traits>

namespace tdcopier {

static_assert(std::is_same_v<decltype(PyTensor::tensor), decltype(THPVariable::cdata)>);
static_assert(offsetof(PyTensor, tensor) == offsetof(THPVariable, cdata));
static_assert(offsetof(PyTensor, backward_hooks) == offsetof(THPVariable, backward_hooks));
static_assert(offsetof(PyTensor, post_accumulate_grad_hooks) ==
              offsetof(THPVariable, post_accumulate_grad_hooks));
static_assert(sizeof(PyTensor) == sizeof(THPVariable));

bool is_tensor(PyObject* object) {
  return THPVariable_Check(object);
}

}  // namespace tdcopier
