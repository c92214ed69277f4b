// Leaves that are rows of a table, picked by number.
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <vector>

#include "engine/leaf.h"

namespace tdcopier {
namespace {

// Do the dimensions from `first` on lie as in a contiguous tensor?
bool is_contiguous_from(size_t first, at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > first;) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

// Elements from a row to the next, where the first `lead` dimensions count rows as one would.
std::optional<int64_t> row_stride(size_t lead, at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::optional<int64_t> stride;
  int64_t rows = 1;
  for (size_t d = lead; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (!stride) stride = strides[d];
    if (strides[d] != *stride * rows) return std::nullopt;
    rows *= sizes[d];
  }
  return stride.value_or(0);  // there is one row
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

}  // namespace

bool LeafTable::add_rows_if_packable(const at::Tensor& tensor,
                                     const std::shared_ptr<const RowIndex>& index, bool adjoining) {
  const PlainTensor plain = look_at(tensor, plain_keys_);
  if (plain.packable != Packable::kYes) return false;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const at::IntArrayRef sizes = impl->sizes();
  const at::IntArrayRef strides = impl->strides();
  const size_t lead = index->lead;
  if (adjoining && (lead != 1 || impl->numel() == 0)) return false;
  if (sizes.size() < lead || !is_contiguous_from(lead, sizes, strides)) return false;
  const std::optional<int64_t> stride = row_stride(lead, sizes, strides);
  if (!stride) return false;

  std::vector<int64_t> arrived(index->sizes);
  arrived.insert(arrived.end(), sizes.begin() + static_cast<ptrdiff_t>(lead), sizes.end());
  uint64_t row_elements = 1;
  for (size_t d = lead; d < sizes.size(); ++d) row_elements *= static_cast<uint64_t>(sizes[d]);
  const uint64_t table_rows = row_elements == 0 ? 0 : impl->numel() / row_elements;
  if (table_rows > 1) {  // those that repeat or interleave are torch's
    const auto step = static_cast<uint64_t>(std::max<int64_t>(*stride, 0));
    if (step < row_elements || (adjoining && step != row_elements)) return false;
  }
  const uint64_t element_bytes = impl->itemsize();
  const std::byte* data = static_cast<const std::byte*>(plain.storage->data()) + plain.begin;
  const c10::ScalarType dtype = c10::typeMetaToScalarType(impl->dtype());
  add_own(data, dtype, arrived, contiguous_strides(arrived));
  Leaf& leaf = leaves_.back();
  leaf.strided = true;
  leaf.row_layout = static_cast<uint32_t>(row_layouts_.size());
  row_layouts_.push_back({*stride * static_cast<int64_t>(element_bytes),
                          std::max<uint64_t>(row_elements * element_bytes, 1)});
  row_index_ = index;
  return true;
}

}  // namespace tdcopier
