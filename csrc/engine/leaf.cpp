// The white list of what is packed, and the table of leaves.
#include "engine/leaf.h"

#include <c10/core/GradMode.h>
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

bool storage_covers_extent(const at::Tensor& tensor, uint64_t bytes) {
  const uint64_t begin = static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize();
  return begin + bytes <= tensor.storage().nbytes();
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
  leaves_.push_back({data, bytes, dtype, static_cast<uint32_t>(sizes.size()),
                     static_cast<uint32_t>(shapes_.size())});
  extents_.push_back({bytes, element_bytes});
  shapes_.insert(shapes_.end(), sizes.begin(), sizes.end());
  shapes_.insert(shapes_.end(), strides.begin(), strides.end());
}

at::IntArrayRef LeafTable::sizes(const Leaf& leaf) const {
  return {shapes_.data() + leaf.first_size, leaf.dims};
}

at::IntArrayRef LeafTable::strides(const Leaf& leaf) const {
  return {shapes_.data() + leaf.first_size + leaf.dims, leaf.dims};
}

bool is_packable(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (has_more_than(impl->key_set(), kPlainKeys) || !impl->has_storage()) return false;
  if (impl->layout() != c10::kStrided || !impl->is_non_overlapping_and_dense()) return false;
  if (has_names(tensor)) return false;
  if (impl->autograd_meta() != nullptr) {
    if (impl->requires_grad() && c10::GradMode::is_enabled()) return false;
    if (tensor._fw_grad(/*level=*/0).defined()) return false;
  }
  return storage_covers_extent(tensor, impl->numel() * impl->itemsize());
}

bool dispatch_is_altered() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         has_more_than(c10::impl::tls_local_dispatch_key_set().included_, kPlainIncluded);
}

}  // namespace tdcopier
