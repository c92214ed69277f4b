// Leaves that are rows of a table, selected by number.
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>

#include <algorithm>

#include "engine/leaves/leaf.h"

namespace tdcopier {
namespace {

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
