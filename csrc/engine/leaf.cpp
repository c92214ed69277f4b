// The white list of what is packed, and the table of leaves.
#include "engine/leaf.h"

#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace tdcopier {
namespace {

// All that a plain host tensor carries. Anything beyond it means that a copy of the bytes is not
// enough.
constexpr c10::DispatchKeySet kPlainKeys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                          c10::DispatchKey::AutocastCPU,
                                          c10::DispatchKey::ADInplaceOrView});

// What torch includes by itself, without any mode or transform.
constexpr c10::DispatchKeySet kPlainIncluded({c10::DispatchKey::BackendSelect,
                                              c10::DispatchKey::ADInplaceOrView});

// Compares the raw bits: the sets' own difference leaves backend bits in.
bool has_more_than(c10::DispatchKeySet keys, c10::DispatchKeySet allowed) {
  return (keys.raw_repr() & ~allowed.raw_repr()) != 0;
}

// Named tensors are gone from torch 2.13 on.
template <typename Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); }) {
    return tensor.has_names();
  } else {
    return false;
  }
}

}  // namespace

void LeafTable::reserve(size_t leaves) {
  leaves_.reserve(leaves);
  extents_.reserve(leaves);
  shapes_.reserve(4 * leaves);
}

void LeafTable::add(const void* data, c10::ScalarType dtype, std::span<const int64_t> sizes,
                    std::span<const int64_t> strides) {
  const auto element_bytes = static_cast<uint32_t>(c10::elementSize(dtype));
  uint64_t bytes = element_bytes;
  for (const int64_t size : sizes) bytes *= static_cast<uint64_t>(size);
  const auto dims = static_cast<uint32_t>(sizes.size());
  leaves_.push_back({data, bytes, dtype, dims, static_cast<uint32_t>(shapes_.size())});
  extents_.push_back({bytes, element_bytes});
  for (const int64_t size : sizes) shapes_.push_back(size);
  for (const int64_t stride : strides) shapes_.push_back(stride);
}

bool LeafTable::add_if_packable(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  // The keys also say that it is strided and that its storage is in host memory.
  if (has_more_than(impl->key_set(), kPlainKeys)) return false;
  if (!impl->is_non_overlapping_and_dense() || has_names(tensor)) return false;
  if (impl->autograd_meta() != nullptr) {
    if (impl->requires_grad() && c10::GradMode::is_enabled()) return false;
    if (tensor._fw_grad(/*level=*/0).defined()) return false;
  }
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) return false;
  const uint64_t element_bytes = impl->itemsize();
  const uint64_t begin = static_cast<uint64_t>(impl->storage_offset()) * element_bytes;
  const uint64_t bytes = static_cast<uint64_t>(impl->numel()) * element_bytes;
  if (begin + bytes > storage->nbytes()) return false;
  const at::IntArrayRef sizes = impl->sizes();
  const at::IntArrayRef strides = impl->strides();
  add(static_cast<const std::byte*>(storage->data()) + begin,
      c10::typeMetaToScalarType(impl->dtype()), {sizes.data(), sizes.size()},
      {strides.data(), strides.size()});
  return true;
}

at::IntArrayRef LeafTable::sizes(const Leaf& leaf) const {
  return {shapes_.data() + leaf.first_size, leaf.dims};
}

at::IntArrayRef LeafTable::strides(const Leaf& leaf) const {
  return {shapes_.data() + leaf.first_size + leaf.dims, leaf.dims};
}

bool dispatch_is_altered() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         has_more_than(c10::impl::tls_local_dispatch_key_set().included_, kPlainIncluded);
}

}  // namespace tdcopier
