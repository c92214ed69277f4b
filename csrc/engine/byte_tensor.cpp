// Byte tensors made directly from an implementation object: no dispatcher call, no view
// bookkeeping.
#include "engine/byte_tensor.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>

#include <utility>

namespace tdcopier {

c10::DispatchKeySet plain_key_set(c10::Device device) {
  return c10::DispatchKeySet(c10::computeDispatchKey(c10::ScalarType::Byte, c10::kStrided, device));
}

at::Tensor byte_tensor(c10::DataPtr memory, uint64_t bytes) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                             /*allocator=*/nullptr, /*resizable=*/false);
  return byte_view(storage, 0, bytes);
}

at::Tensor byte_view(const c10::Storage& storage, uint64_t offset, uint64_t bytes) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), plain_key_set(storage.device()), caffe2::TypeMeta::Make<uint8_t>());
  const int64_t sizes[] = {static_cast<int64_t>(bytes)};
  const int64_t strides[] = {1};
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, static_cast<int64_t>(offset));
  return view;
}

}  // namespace tdcopier
