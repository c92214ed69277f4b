// The class of the tensors that a copy makes. None requires a gradient: look_at() in leaf.h leaves
// those that do to `.to`. leaf.h says which sizes and strides they have.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <typeinfo>
#include <utility>

#include "base/block_stack.h"
#include "base/spare_stack.h"

namespace tdcopier {

// A plain tensor whose object comes from a pool of memory blocks, and its version counter from a
// pool of counters, because each batch makes hundreds and drops those of the batch before. A thread
// has the blocks and counters of those that it has dropped.
class OutputTensor final : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;

  // Views and saved variables may share the counter, and then it goes on counting for them.
  ~OutputTensor() override {
    if (!version_counter_.enabled() || !version_counter_.unique()) return;
    if (version_counter_.current_version() != 0) version_counter_.set_version(0);
    Counters::give(std::move(version_counter_));
  }

  // Makes a tensor of inference mode, which has cost no counter, one of normal mode with these
  // keys.
  void leave_inference_mode(c10::DispatchKeySet keys) {
    key_set_ = keys;
    version_counter_ = Counters::take();
    if (!version_counter_.enabled()) version_counter_ = c10::VariableVersion(0);
  }

  // Returns null if the tensor has an implementation of another class, for example after a swap
  // with another tensor.
  static OutputTensor* of(const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const std::type_info& type = typeid(*impl);
    return type == typeid(OutputTensor) ? static_cast<OutputTensor*>(impl) : nullptr;
  }

  // Returns whether the tensor has no gradient state, exactly these keys, and no other attribute
  // that torch may set. Its shape, storage and version may have changed.
  bool is_plain(c10::DispatchKeySet keys) {
    return autograd_meta() == nullptr && extra_meta_ == nullptr && key_set_ == keys &&
           !is_wrapped_number_ && allow_tensor_metadata_change_ && !reserved_ &&
           !storage_access_should_throw_ && sizes_strides_policy_ == 0 && !device_policy_ &&
           !layout_policy_;
  }

  // Moves the tensor to another place and restarts its version at 0, in a counter of its own: views
  // of the old place may share the old one. Finally it drops the old storage, which may run any
  // code.
  void move_to(c10::Storage storage, uint64_t offset) {
    const c10::Storage old = std::exchange(storage_, std::move(storage));
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
  using Counters = SpareStack<c10::VariableVersion, kMostKept>;
};
static_assert(sizeof(OutputTensor) == sizeof(c10::TensorImpl));

}  // namespace tdcopier
