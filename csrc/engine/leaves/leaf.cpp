// The white list of packable tensors, and the table of leaves: whole ones, or rows of tables.
#include "engine/leaves/leaf.h"

#include <ATen/ExpandUtils.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <vector>

#include "engine/device/byte_tensor.h"
#include "engine/device/pinned_ranges.h"

namespace tdcopier {
namespace {

// Keys that torch includes by default, without any mode or transform.
constexpr c10::DispatchKeySet kPlainIncluded({c10::DispatchKey::BackendSelect,
                                              c10::DispatchKey::ADInplaceOrView});

// Compares raw bits, because the difference of two key sets keeps backend bits.
bool has_more_than(c10::DispatchKeySet keys, c10::DispatchKeySet allowed) {
  return (keys.raw_repr() & ~allowed.raw_repr()) != 0;
}

// torch has no named tensors from 2.13 on.
template <typename Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); }) {
    return tensor.has_names();
  } else {
    return false;
  }
}

// Returns whether the dimensions from `first` on have contiguous strides.
bool is_contiguous_from(size_t first, at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > first;) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

// Returns the number of elements from a row to the next; nullopt if the first `lead` dimensions do
// not count rows as a single one would.
std::optional<int64_t> row_stride(size_t lead, at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::optional<int64_t> stride;
  int64_t rows = 1;
  for (size_t d = lead; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (!stride) stride = strides[d];
    if (strides[d] != *stride * rows) return std::nullopt;
    rows *= sizes[d];
  }
  return stride.value_or(0);  // there is only one row
}

c10::DimVector contiguous_strides(at::IntArrayRef sizes) {
  c10::DimVector strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

}  // namespace

bool keeps_gradient(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->autograd_meta() == nullptr) return false;
  if (impl->requires_grad() && c10::GradMode::is_enabled()) return true;
  return tensor._fw_grad(/*level=*/0).defined();
}

c10::DispatchKeySet plain_tensor_keys(c10::Device device) {
  const c10::DispatchKeySet dense = plain_key_set(device);
  const c10::BackendComponent backend = dense.highestBackendKey();
  return dense | c10::getAutogradRelatedKeySetFromBackend(backend) |
         c10::getAutocastRelatedKeySetFromBackend(backend) |
         c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
}

LeafTable::LeafTable(c10::Device device)
    : device_(device), plain_keys_(plain_tensor_keys(device)) {}

bool LeafTable::is_like(const LeafTable& other) const {
  const auto alike = [](const Leaf& mine, const Leaf& its) {
    return mine.dtype == its.dtype && mine.dims == its.dims && mine.strided == its.strided;
  };
  return device_ == other.device_ && std::ranges::equal(leaves_, other.leaves_, alike) &&
         shapes_ == other.shapes_;
}

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
  leaves_.push_back(
      {data, bytes, dtype, /*strided=*/false, dims, static_cast<uint32_t>(shapes_.size())});
  extents_.push_back({bytes, element_bytes, static_cast<uint32_t>(dtype)});
  for (const int64_t size : sizes) shapes_.push_back(size);
  for (const int64_t stride : strides) shapes_.push_back(stride);
}

void LeafTable::add_strided(const void* data, c10::ScalarType dtype, std::span<const int64_t> sizes,
                            std::span<const int64_t> strides,
                            std::span<const int64_t> source_strides_bytes) {
  add(data, dtype, sizes, strides);
  leaves_.back().strided = true;
  for (const int64_t stride : source_strides_bytes) shapes_.push_back(stride);
}

void LeafTable::add_placed(const LeafTable& others, const PackPlan& plan, const std::byte* image,
                           bool pinned) {
  const auto first_size = static_cast<uint32_t>(shapes_.size());
  for (size_t i = 0; i < others.size(); ++i) {
    leaves_.push_back(others[i]);
    leaves_.back().data = image + plan.begin_of(i);
    leaves_.back().first_size += first_size;
    leaves_.back().pinned = pinned && leaves_.back().bytes > kMaxPackedLeafBytes;
  }
  extents_.insert(extents_.end(), others.extents_.begin(), others.extents_.end());
  shapes_.insert(shapes_.end(), others.shapes_.begin(), others.shapes_.end());
}

std::vector<std::string> other_keys(const at::Tensor& tensor, c10::DispatchKeySet plain) {
  const uint64_t others = tensor.key_set().raw_repr() & ~plain.raw_repr();
  std::vector<std::string> names;
  // The bits of backends come first. A key for all backends has one bit besides theirs, so
  // DispatchKeySet's own iterator would skip it here, where the backend's bit is masked.
  for (uint8_t bit = 0; bit < c10::num_backends; ++bit) {
    if ((others >> bit & 1) == 0) continue;
    names.emplace_back(c10::toString(static_cast<c10::BackendComponent>(bit + 1)));
  }
  for (uint8_t key = 1; key < static_cast<uint8_t>(c10::num_functionality_keys); ++key) {
    if ((others >> (c10::num_backends + key - 1) & 1) == 0) continue;
    names.emplace_back(c10::toString(static_cast<c10::DispatchKey>(key)));
  }
  return names;
}

PlainTensor look_at(const at::Tensor& tensor, c10::DispatchKeySet plain) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  // The keys also tell that the tensor is strided and which device it is on.
  if (has_more_than(impl->key_set(), plain)) {
    return {has_names(tensor) ? Packable::kNamed : Packable::kOtherKeys};  // names have a key too
  }
  if (has_names(tensor)) return {Packable::kNamed};
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) return {Packable::kNoStorage};
  const at::IntArrayRef sizes = impl->sizes();
  const at::IntArrayRef strides = impl->strides();
  const bool dense = impl->is_non_overlapping_and_dense();
  const uint64_t element_bytes = impl->itemsize();
  const auto elements = static_cast<uint64_t>(impl->numel());
  const uint64_t begin = static_cast<uint64_t>(impl->storage_offset()) * element_bytes;
  uint64_t reach = elements;  // number of elements in memory from the first to the last
  if (!dense && elements != 0) {
    reach = 1;
    for (size_t d = 0; d < sizes.size(); ++d) {
      reach += static_cast<uint64_t>((sizes[d] - 1) * strides[d]);
    }
  }
  if (elements != 0 && begin + reach * element_bytes > accessible_bytes(*storage)) {
    return {Packable::kShortStorage};
  }
  if (keeps_gradient(tensor)) return {Packable::kGradient};
  return {Packable::kYes, storage, begin, dense};
}

std::string why_out_of_reach(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (storage.nbytes() != 0 && accessible_bytes(storage) == 0) {
    return " is parked, so it has no memory: call resume() of the handle of park()";
  }
  return " reaches beyond its storage, which has only " + std::to_string(storage.nbytes()) +
         " bytes (was it parked, or shrunk with untyped_storage().resize_()?)";
}

Packable LeafTable::add_if_packable(const at::Tensor& tensor) {
  const PlainTensor plain = look_at(tensor, plain_keys_);
  if (plain.packable != Packable::kYes) return plain.packable;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const at::IntArrayRef sizes = impl->sizes();
  const at::IntArrayRef strides = impl->strides();
  const uint64_t element_bytes = impl->itemsize();
  const auto* data = static_cast<const std::byte*>(plain.storage->data()) + plain.begin;
  const c10::ScalarType dtype = c10::typeMetaToScalarType(impl->dtype());
  if (plain.dense) {
    add(data, dtype, sizes, strides);
    return Packable::kYes;
  }
  if (static_cast<uint64_t>(impl->numel()) > kMaxLeafBytes / element_bytes) {
    return Packable::kTooLarge;
  }
  // A device reads aligned elements only.
  const bool aligned = reinterpret_cast<uintptr_t>(data) % element_bytes == 0;
  if (!device_.is_cpu() && !aligned) return Packable::kUnaligned;
  add_gapped(data, dtype, sizes, strides);
  return Packable::kYes;
}

// A function of its own, to keep the path of dense leaves short.
void LeafTable::add_gapped(const void* data, c10::ScalarType dtype, at::IntArrayRef sizes,
                           at::IntArrayRef strides) {
  std::vector<int64_t> strides_bytes(strides.begin(), strides.end());
  for (int64_t& stride : strides_bytes) stride *= static_cast<int64_t>(c10::elementSize(dtype));
  // As `Tensor.to` does: dense, in the same order of dimensions.
  const std::vector<int64_t> dense = at::infer_dense_strides(sizes, strides);
  add_strided(data, dtype, sizes, dense, strides_bytes);
}

void LeafTable::find_pinned() {
  for (Leaf& leaf : leaves_) {
    if (leaf.strided || leaf.bytes <= kMaxPackedLeafBytes) continue;
    leaf.pinned = is_pinned({static_cast<const std::byte*>(leaf.data), leaf.bytes});
  }
}

void LeafTable::note_pinned_series(uint32_t first) {
  const auto last = static_cast<uint32_t>(leaves_.size());
  if (pinned_series_.empty() || pinned_series_.back().first != first) {
    pinned_series_.push_back({first, last});
  }
  pinned_series_.back().last = last;
}

std::vector<LeafSeries> LeafTable::pinned_runs(const PackOptions& options) const {
  if (pinned_series_.empty()) return {};
  RecycledVector<uintptr_t> addresses;
  addresses.reserve(leaves_.size());
  for (const Leaf& leaf : leaves_) addresses.push_back(reinterpret_cast<uintptr_t>(leaf.data));
  return find_runs(extents(), addresses, pinned_series_, options);
}

at::IntArrayRef LeafTable::sizes(const Leaf& leaf) const {
  return {shapes_.data() + leaf.first_size, leaf.dims};
}

at::IntArrayRef LeafTable::strides(const Leaf& leaf) const {
  return {shapes_.data() + leaf.first_size + leaf.dims, leaf.dims};
}

at::IntArrayRef LeafTable::source_strides_bytes(const Leaf& leaf) const {
  return {shapes_.data() + leaf.first_size + 2 * size_t{leaf.dims}, leaf.dims};
}

std::span<const std::byte> LeafTable::reach(const Leaf& leaf) const {
  const auto* first = static_cast<const std::byte*>(leaf.data);
  if (!leaf.strided || leaf.bytes == 0) return {first, leaf.bytes};
  const at::IntArrayRef counts = sizes(leaf);
  const at::IntArrayRef steps = source_strides_bytes(leaf);
  int64_t below = 0;  // an array may have negative strides
  auto above = static_cast<int64_t>(c10::elementSize(leaf.dtype));
  for (size_t d = 0; d < counts.size(); ++d) {
    const int64_t span = (counts[d] - 1) * steps[d];
    (span < 0 ? below : above) += span;
  }
  return {first + below, static_cast<size_t>(above - below)};
}

bool dispatch_is_altered() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         has_more_than(c10::impl::tls_local_dispatch_key_set().included_, kPlainIncluded);
}

// ---- rows of a table ----------------------------------------------------------------------------

std::optional<RowTable> look_at_rows(const at::Tensor& tensor, size_t lead) {
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  if (sizes.size() < lead) return std::nullopt;
  int64_t rows = 1;
  for (size_t d = 0; d < lead; ++d) rows *= sizes[d];
  int64_t row_elements = 1;
  for (size_t d = lead; d < sizes.size(); ++d) row_elements *= sizes[d];
  if (row_elements == 0) return RowTable{{1, 1}, rows};  // never accessed: any strides will do
  if (!is_contiguous_from(lead, sizes, strides)) return std::nullopt;
  const std::optional<int64_t> stride = row_stride(lead, sizes, strides);
  if (!stride) return std::nullopt;
  if (rows > 1 && *stride < row_elements) return std::nullopt;  // they overlap, or interleave
  const auto element_bytes = static_cast<int64_t>(tensor.itemsize());
  const auto row_bytes = static_cast<uint64_t>(row_elements * element_bytes);
  return RowTable{{*stride * element_bytes, row_bytes}, rows};
}

Packable LeafTable::add_rows_if_packable(const at::Tensor& tensor,
                                         const std::shared_ptr<const RowIndex>& index,
                                         bool adjoining) {
  const PlainTensor plain = look_at(tensor, plain_keys_);
  if (plain.packable != Packable::kYes) return plain.packable;
  const size_t lead = index->lead;
  const std::optional<RowTable> table = look_at_rows(tensor, lead);
  if (!table) return Packable::kNoRows;
  const auto& [stride_bytes, row_bytes] = table->layout;
  if (adjoining) {
    if (lead != 1 || tensor.numel() == 0) return Packable::kNoRows;
    if (table->rows > 1 && stride_bytes != static_cast<int64_t>(row_bytes))
      return Packable::kNoRows;
  }
  const at::IntArrayRef row = tensor.sizes().slice(lead);
  c10::DimVector arrived(index->sizes.begin(), index->sizes.end());
  arrived.append(row.begin(), row.end());
  const std::byte* data = static_cast<const std::byte*>(plain.storage->data()) + plain.begin;
  const c10::ScalarType dtype = c10::typeMetaToScalarType(tensor.dtype());
  add(data, dtype, arrived, contiguous_strides(arrived));
  Leaf& leaf = leaves_.back();
  leaf.strided = true;
  leaf.row_layout = static_cast<uint32_t>(row_layouts_.size());
  row_layouts_.push_back(table->layout);
  row_index_ = index;
  return Packable::kYes;
}

}  // namespace tdcopier
