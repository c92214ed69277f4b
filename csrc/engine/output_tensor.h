// The tensors that a copy hands over.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <typeinfo>
#include <utility>

#include "base/block_stack.h"

namespace tdcopier {

// A plain tensor but for where its object lies. A batch makes hundreds, and drops those of the
// batch before.
class OutputTensor final : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;

  // Null if the tensor is another kind of object: it may have swapped its with another tensor.
  static OutputTensor* of(const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const std::type_info& type = typeid(*impl);
    return type == typeid(OutputTensor) ? static_cast<OutputTensor*>(impl) : nullptr;
  }

  // Has it nothing to do with gradients, these keys, and whatever else torch may note of a tensor
  // unset? Its shape, storage and version may be others than they were.
  bool is_plain(c10::DispatchKeySet keys) {
    return autograd_meta() == nullptr && extra_meta_ == nullptr && key_set_ == keys &&
           !is_wrapped_number_ && allow_tensor_metadata_change_ && !reserved_ &&
           !storage_access_should_throw_ && sizes_strides_policy_ == 0 && !device_policy_ &&
           !layout_policy_;
  }

  // Another place, and a version of its own, from 0 on: views of the old place may share its. May
  // run any code, once all that is done: the old storage may go.
  void move_to(const c10::Storage& storage, uint64_t offset) {
    const c10::Storage old = std::exchange(storage_, storage);
    storage_offset_ = static_cast<int64_t>(offset);
    if (is_inference()) return;
    if (version_counter_.current_version() == 0 && version_counter_.unique()) return;
    version_counter_ = c10::VariableVersion(0);
  }

  static void* operator new(size_t) { return Blocks::take(); }
  static void operator delete(void* block) noexcept { Blocks::give(block); }

 private:
  static constexpr size_t kMostKept = 4096;  // under 1 MiB
  using Blocks = BlockStack<sizeof(c10::TensorImpl), kMostKept>;
};
static_assert(sizeof(OutputTensor) == sizeof(c10::TensorImpl));

}  // namespace tdcopier
