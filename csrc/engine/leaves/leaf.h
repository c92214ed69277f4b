// The leaves that the engine moves itself: where their bytes are, and which tensors they become.
// look_at() decides which plain tensors those are. python/walk/sort_leaves.cpp decides before it
// (torch modes, devices, tensors that are reused), and python/walk/value_kind.h by class. All
// others are left to `.to`.
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
#include <string>
#include <vector>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "base/row_copy.h"
#include "base/row_index.h"

namespace tdcopier {

// A strided leaf of more than this repeats its elements, and its copy fits in no memory. It is left
// to `Tensor.to`, which reports that best.
inline constexpr uint64_t kMaxLeafBytes = uint64_t{1} << 40;

// A leaf in the memory of its table's device. Its bytes are contiguous, in any order of dimensions,
// or it is strided: it has gaps, repeats or a reversed order, and arrives without them. Rows of a
// table that are selected by number count as strided.
struct Leaf {
  const void* data;  // the first element
  uint64_t bytes;    // of its elements
  c10::ScalarType dtype;
  bool strided;
  uint32_t dims;                  // number of dimensions
  uint32_t first_size;            // index of its sizes in LeafTable::shapes_; strides follow them
  bool pinned = false;            // a device can read it directly; checked for large leaves only
  uint32_t row_layout = kNoRows;  // index in LeafTable::row_layouts_, of a leaf that is rows

  static constexpr uint32_t kNoRows = ~uint32_t{0};
  bool is_rows() const { return row_layout != kNoRows; }
};

enum class Packable : uint8_t {
  kYes,           // the engine copies it; `add_if_packable` has added it
  kShortStorage,  // its elements reach beyond its storage, so no copy can read them
  // All others: it is left to `Tensor.to`, because
  kOtherKeys,  // it has dispatch keys that plain tensors lack, see other_keys()
  kNamed,      // its dimensions have names
  kNoStorage,  // it has no storage
  kGradient,   // it has a gradient to keep, see keeps_gradient()
  kTooLarge,   // it repeats its elements, and a copy would exceed kMaxLeafBytes
  kUnaligned,  // it is strided, and a device cannot read its elements at their address
  kNoRows,     // the engine cannot read rows of it
};

// Returns whether a copy of the bytes would lose a gradient.
bool keeps_gradient(const at::Tensor& tensor);

// Returns all keys that a plain strided tensor of the device may have. For a tensor with any other
// key, a copy of the bytes is not enough.
c10::DispatchKeySet plain_tensor_keys(c10::Device device);

// Returns the names of the tensor's keys that are not in `plain`, for example "Sparse",
// "Conjugate".
std::vector<std::string> other_keys(const at::Tensor& tensor, c10::DispatchKeySet plain);

// The bytes of a storage that can be read: none of a parked one, which may keep its size.
inline uint64_t accessible_bytes(c10::StorageImpl& storage) {
  return storage._mutable_data_ptr_no_checks().get() == nullptr ? 0 : storage.nbytes();
}

// The properties of a tensor that the engine needs to read or write it.
struct PlainTensor {
  Packable packable;
  c10::StorageImpl* storage = nullptr;  // this and the rest: for kYes only
  uint64_t begin = 0;                   // offset of the first element in the storage, in bytes
  bool dense = true;                    // its bytes are contiguous, in any order of dimensions
};

// Checks whether the tensor is plain: no keys but `plain`, no names, no gradient to keep, and a
// storage that covers its extent. Everything else that torch has, now or later, is left to torch.
PlainTensor look_at(const at::Tensor& tensor, c10::DispatchKeySet plain);

// Returns why the storage of a tensor that look_at() finds kShortStorage does not cover it, for
// messages after its path.
std::string why_out_of_reach(const at::Tensor& tensor);

// Returns the layout of a plain tensor's rows, where the first `lead` dimensions count the rows;
// nullopt if they are not contiguous, or do not ascend in memory. A table of one row has any
// stride.
std::optional<RowTable> look_at_rows(const at::Tensor& tensor, size_t lead);

// The leaves of one device, by index. Has its own sizes and strides, all in one array, because the
// source may be gone when outputs are made.
class LeafTable {
 public:
  explicit LeafTable(c10::Device device);

  // Returns whether the leaves of both tables differ only in their addresses. Requires: none is
  // rows.
  bool is_like(const LeafTable& other) const;

  const c10::Device& device() const { return device_; }
  void reserve(size_t leaves);
  // Adds a contiguous leaf. `data` has the product of `sizes` elements; `strides` are in elements.
  void add(const void* data, c10::ScalarType dtype, std::span<const int64_t> sizes,
           std::span<const int64_t> strides);
  // The same without a shape, for a leaf that gets no output.
  void add_bytes(const void* data, c10::ScalarType dtype, uint64_t bytes, uint32_t element_bytes) {
    leaves_.push_back({data, bytes, dtype, /*strided=*/false, 0, 0});
    extents_.push_back({bytes, element_bytes, static_cast<uint32_t>(dtype)});
  }
  // Adds a strided leaf. `data` is the first element, `source_strides_bytes` lead to the others;
  // `strides`, in elements, are those of the contiguous output.
  void add_strided(const void* data, c10::ScalarType dtype, std::span<const int64_t> sizes,
                   std::span<const int64_t> strides, std::span<const int64_t> source_strides_bytes);

  // Adds the leaves of another table, which have no addresses, where `plan` puts them in the image
  // that begins at `image`. With `pinned`, large ones are marked as pinned. Requires: the other
  // table has no strided leaves and no rows.
  void add_placed(const LeafTable& others, const PackPlan& plan, const std::byte* image,
                  bool pinned = false);

  // Adds the tensor if the engine may read its bytes itself: only a plain one of the table's
  // device, with no functorch, conj, neg, Python or wrapper keys. Others are left to `Tensor.to`.
  Packable add_if_packable(const at::Tensor& tensor);

  // Adds rows of a host tensor as a leaf that arrives contiguous. Its shape is the tensor's, with
  // the index's shape in place of the first dimensions. Returns kNoRows and adds nothing if the
  // engine cannot read the rows: the tensor is not packable, or its rows are not contiguous, or do
  // not ascend in memory. With `adjoining`, one dimension must count the rows, and they must be
  // adjacent. Requires: the rows exist; all such leaves of a table have the same index.
  Packable add_rows_if_packable(const at::Tensor& tensor,
                                const std::shared_ptr<const RowIndex>& index, bool adjoining);
  // Requires: leaf.is_rows().
  RowLayout row_layout(const Leaf& leaf) const { return row_layouts_[leaf.row_layout]; }
  std::span<const int64_t> rows() const { return row_index_->rows; }
  const std::shared_ptr<const RowIndex>& row_index() const { return row_index_; }  // null: no rows

  // Marks the leaf that was added last as pinned.
  void note_pinned() { leaves_.back().pinned = true; }
  // Looks at all large leaves without gaps, and marks those that are pinned. Requires: they are on
  // the host.
  void find_pinned();
  // Marks the leaves from `first` on as a series in one pinned storage. Call it again when the
  // series has grown. Requires: none of them is strided.
  void note_pinned_series(uint32_t first);
  // Returns the runs of pinned leaves that a device can read in one piece.
  std::vector<LeafSeries> pinned_runs(const PackOptions& options) const;

  size_t size() const { return leaves_.size(); }
  const Leaf& operator[](size_t i) const { return leaves_[i]; }
  at::IntArrayRef sizes(const Leaf& leaf) const;    // (dims,)
  at::IntArrayRef strides(const Leaf& leaf) const;  // (dims,), in elements, of the output
  // (dims,), in bytes. Requires: the leaf is strided, and not rows.
  at::IntArrayRef source_strides_bytes(const Leaf& leaf) const;
  // All memory from the leaf's first byte to its last, with the gaps of a strided leaf. Requires:
  // it is not rows.
  std::span<const std::byte> reach(const Leaf& leaf) const;
  std::span<const Leaf> all() const { return leaves_; }
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

// Returns whether this thread is in a state that changes what `Tensor.to` does (a dispatch mode, a
// functorch transform, functionalization). If so, every leaf is left to `Tensor.to`.
bool dispatch_is_altered();

}  // namespace tdcopier
