// What the engine knows of a leaf that it moves itself: where its bytes are and what tensor they
// make.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "base/row_copy.h"
#include "base/row_index.h"

namespace tdcopier {

// A leaf that claims more than this repeats its elements, and no memory holds them: `Tensor.to`
// says so best.
inline constexpr uint64_t kMaxLeafBytes = uint64_t{1} << 40;

// A leaf in the memory of its table's device. Its bytes lie together, in whatever order of
// dimensions, or it is strided: with gaps, repeats or a reversed order, and arrives without. Rows
// of a table that are picked by number count as strided.
struct Leaf {
  const void* data;  // the first element
  uint64_t bytes;    // of its elements
  c10::ScalarType dtype;
  bool strided;
  uint32_t dims;        // number of dimensions
  uint32_t first_size;  // index of its sizes in LeafTable::shapes_; strides follow them
  bool pinned = false;  // on the host: a device can read it by itself; asked of large ones only
  uint32_t row_layout = kNoRows;  // index in LeafTable::row_layouts_, of a leaf that is rows

  static constexpr uint32_t kNoRows = ~uint32_t{0};
  bool is_rows() const { return row_layout != kNoRows; }
};

enum class Packable {
  kYes,           // and it was added
  kNo,            // `Tensor.to` knows what to do with it
  kShortStorage,  // its elements reach beyond its storage: nobody can read them
};

// Would a copy of its bytes lose a gradient?
bool keeps_gradient(const at::Tensor& tensor);

// All that a plain strided tensor of the device carries. Anything beyond it means that a copy of
// the bytes is not enough.
c10::DispatchKeySet plain_tensor_keys(c10::Device device);

// A tensor, as far as the engine reads and writes it.
struct PlainTensor {
  Packable packable;
  c10::StorageImpl* storage = nullptr;  // the rest too is for kYes only
  uint64_t begin = 0;                   // the first element's place in it, in bytes
  bool dense = true;                    // its bytes lie together, in whatever order of dimensions
};

// Is it plain: with no keys but `plain`, no names, no gradient to keep, storage that covers the
// extent? Whatever else torch has or will have is left to torch.
PlainTensor look_at(const at::Tensor& tensor, c10::DispatchKeySet plain);

// How the rows of a plain tensor lie, whose first `lead` dimensions count them. Nothing where they
// are not contiguous, or do not ascend in memory. A table of one row has any stride.
std::optional<RowTable> look_at_rows(const at::Tensor& tensor, size_t lead);

// Leaves of one device, by index. Sizes and strides lie in one array: the source may be gone when
// outputs are built.
class LeafTable {
 public:
  explicit LeafTable(c10::Device device);

  // Are the leaves the same but for where they are? Requires: none is rows.
  bool is_like(const LeafTable& other) const;

  const c10::Device& device() const { return device_; }
  void reserve(size_t leaves);
  // `data` holds the product of `sizes` elements, contiguous; `strides` are in elements.
  void add(const void* data, c10::ScalarType dtype, std::span<const int64_t> sizes,
           std::span<const int64_t> strides);
  // The same without a shape, for a leaf of which no output is made.
  void add_bytes(const void* data, c10::ScalarType dtype, uint64_t bytes, uint32_t element_bytes) {
    leaves_.push_back({data, bytes, dtype, /*strided=*/false, 0, 0});
    extents_.push_back({bytes, element_bytes, static_cast<uint32_t>(dtype)});
  }
  // `data` is the first element, `source_strides_bytes` lead to the others; `strides`, in elements,
  // are those of the contiguous output.
  void add_strided(const void* data, c10::ScalarType dtype, std::span<const int64_t> sizes,
                   std::span<const int64_t> strides, std::span<const int64_t> source_strides_bytes);

  // May the engine read this tensor's bytes itself? Only a plain one of the table's device: no
  // functorch, conj, neg, Python or wrapper keys. Others are left to `Tensor.to`.
  Packable add_if_packable(const at::Tensor& tensor);

  // Adds the rows of a host tensor, its first dimensions replaced by the index's shape, as a leaf
  // that arrives contiguous. Nothing is added where the engine cannot read them, kNo:
  // the tensor is not packable, or its rows are not contiguous, or do not ascend in memory. With
  // `adjoining` one dimension must count them, and they lie one behind the other. Every such leaf
  // of a table has the same index. Requires: the rows exist.
  Packable add_rows_if_packable(const at::Tensor& tensor,
                                const std::shared_ptr<const RowIndex>& index, bool adjoining);
  // Requires: leaf.is_rows().
  RowLayout row_layout(const Leaf& leaf) const { return row_layouts_[leaf.row_layout]; }
  std::span<const int64_t> rows() const { return row_index_->rows; }

  // The leaf that was added last is in pinned memory.
  void note_pinned() { leaves_.back().pinned = true; }
  // Leaves from `first` on are of one pinned storage, and none of them is strided. May be said
  // again of a series that has gone on.
  void note_pinned_series(uint32_t first);
  // Runs of leaves that a device can read as one.
  std::vector<LeafSeries> pinned_runs(const PackOptions& options) const;

  size_t size() const { return leaves_.size(); }
  const Leaf& operator[](size_t i) const { return leaves_[i]; }
  at::IntArrayRef sizes(const Leaf& leaf) const;    // (dims,)
  at::IntArrayRef strides(const Leaf& leaf) const;  // (dims,), in elements, of the output
  // (dims,), in bytes. Requires: the leaf is strided, and no rows.
  at::IntArrayRef source_strides_bytes(const Leaf& leaf) const;
  // All memory from its first byte to its last, with the gaps of a strided leaf. Requires: no rows.
  std::span<const std::byte> reach(const Leaf& leaf) const;
  std::span<const LeafExtent> extents() const { return extents_; }

 private:
  void add_gapped(const void* data, c10::ScalarType dtype, at::IntArrayRef sizes,
                  at::IntArrayRef strides);

  const c10::Device device_;
  const c10::DispatchKeySet plain_keys_;
  RecycledVector<Leaf> leaves_;
  RecycledVector<LeafExtent> extents_;  // for the pack plan
  RecycledVector<int64_t> shapes_;
  std::vector<LeafSeries> pinned_series_;
  std::vector<RowLayout> row_layouts_;
  std::shared_ptr<const RowIndex> row_index_;  // null: no leaf is rows
};

// Is this thread in a state that changes what `Tensor.to` does (a dispatch mode, a functorch
// transform, functionalization)? Then every leaf is left to it.
bool dispatch_is_altered();

}  // namespace tdcopier
