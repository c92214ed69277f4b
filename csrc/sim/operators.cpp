// Factories, views, storages and copies. Most others run on the host: operators_on_host.h.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "sim/copy.h"
#include "sim/device_allocator.h"
#include "sim/hooks.h"
#include "sim/registrations.h"
#include "sim/runtime.h"

namespace tdcopier::sim {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// The common part of the factories: makes the device current, so that the allocator uses it.
class Factory {
 public:
  Factory(std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
          std::optional<at::Device> device, std::optional<bool> pinned)
      : dtype_(c10::dtype_or_default(dtype)),
        guard_(c10::Device(kDeviceType, resolve_device(device ? device->index() : -1))) {
    TORCH_CHECK(c10::layout_or_default(layout) == at::Layout::Strided,
                "the simulated device has strided tensors only");
    TORCH_CHECK(!pinned.value_or(false), "only tensors of the host can be pinned");
  }

  at::ScalarType dtype() const { return dtype_; }

 private:
  at::ScalarType dtype_;
  c10::DeviceGuard guard_;
};

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  const Factory factory(dtype, layout, device, pinned);
  return at::detail::empty_generic(size, &DeviceAllocator::get(), kKeys, factory.dtype(), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pinned) {
  const Factory factory(dtype, layout, device, pinned);
  return at::detail::empty_strided_generic(size, stride, &DeviceAllocator::get(), kKeys,
                                           factory.dtype());
}

void grow_storage(const c10::Storage& storage, std::size_t bytes) {
  if (bytes > storage.nbytes()) resize_storage(storage, bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    at::detail::check_size_nonnegative(size);
    if (c10::multiply_integers(size) > 0) {
      grow_storage(self.storage(),
                   at::detail::computeStorageNbytesContiguous(
                       size, impl->itemsize(), static_cast<std::size_t>(impl->storage_offset())));
    }
    impl->set_sizes_contiguous(size);
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_to_part_of_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                                   at::IntArrayRef size, at::IntArrayRef stride) {
  const auto item = self.dtype().itemsize();
  const auto skip = static_cast<std::size_t>(offset);
  if (offset >= 0 && c10::multiply_integers(size) > 0) {
    grow_storage(source, stride.empty() && !size.empty()
                             ? at::detail::computeStorageNbytesContiguous(size, item, skip)
                             : at::detail::computeStorageNbytes(size, stride, item, skip));
  }
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  auto fresh = empty({0}, self.scalar_type(), at::Layout::Strided, self.device(), false, {});
  return at::native::set_tensor_(self, fresh);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::impl::VirtualGuardImpl(kDeviceType).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

}  // namespace

void register_operators() {
  auto& aten = library("aten", c10::DispatchKey::PrivateUse1, __LINE__);
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  aten.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  aten.impl("resize_", TORCH_FN(resize));
  aten.impl("set_", TORCH_FN(set_to_nothing));
  aten.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten.impl("set_.source_Storage", TORCH_FN(set_to_storage));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(set_to_part_of_storage));
  aten.impl("_copy_from", TORCH_FN(copy_from));
  aten.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  aten.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  aten.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  aten.impl("record_stream", TORCH_FN(record_stream));
  // Torch composes these from operators that it picks by the device, and has none for this one.
  aten.impl("convolution", on_host());
  aten.impl("convolution_backward", on_host());

  // Copies handle the conjugate and negative bits themselves. Otherwise torch would first resolve
  // the bits with another copy on the device, in an endless recursion.
  for (const auto bit : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto& copies = library("aten", bit, __LINE__);
    copies.impl("_copy_from", torch::CppFunction::makeFallthrough());
    copies.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
  }

  run_others_on_host(c10::DispatchKey::PrivateUse1, c10::DispatchKey::CPU);
}

}  // namespace tdcopier::sim
