// A view's place is its offset in a storage that begins at the lowest address and never ends: to
// re-point it is to write one number.
#include "engine/byte_views.h"

#include <c10/core/TensorImpl.h>

#include <limits>
#include <utility>

#include "base/internal_error.h"
#include "engine/byte_tensor.h"

namespace tdcopier {
namespace {

// Not 0, since torch takes that for memory that was never allocated; a multiple of every element's
// size.
constexpr uintptr_t kLowestAddress = 64;

c10::Storage address_space(c10::Device device) {
  return {c10::Storage::use_byte_size_t(),
          static_cast<size_t>(std::numeric_limits<int64_t>::max() - kLowestAddress),
          c10::DataPtr(reinterpret_cast<void*>(kLowestAddress), device),
          /*allocator=*/nullptr, /*resizable=*/false};
}

uint64_t place(const void* address) {
  return reinterpret_cast<uintptr_t>(address) - kLowestAddress;
}

c10::ScalarType integer_of(uint32_t element_bytes) {
  using enum c10::ScalarType;
  switch (element_bytes) {
    case 1:
      return Byte;
    case 2:
      return Short;
    case 4:
      return Int;
    case 8:
      return Long;
    default:
      check_invariant(element_bytes == 16, "an element has 1, 2, 4, 8 or 16 bytes");
      return ComplexDouble;
  }
}

}  // namespace

ByteViews::ByteViews(c10::Device device) : everything_(address_space(device)) {}

void ByteViews::add(const void* from, const void* to, uint64_t bytes) {
  if (used_ == from_.size()) {
    from_.push_back(byte_view(everything_, 0, 0));
    to_.push_back(byte_view(everything_, 0, 0));
  }
  const int64_t sizes[] = {static_cast<int64_t>(bytes)};
  const int64_t strides[] = {1};
  from_[used_].unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides,
                                                            static_cast<int64_t>(place(from)));
  to_[used_].unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides,
                                                          static_cast<int64_t>(place(to)));
  ++used_;
}

at::Tensor ByteViews::strided(const void* address, uint32_t element_bytes, at::IntArrayRef sizes,
                              at::IntArrayRef strides) const {
  check_invariant(place(address) % element_bytes == 0, "elements on a device are aligned");
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(everything_), plain_key_set(everything_.device()),
      c10::scalarTypeToTypeMeta(integer_of(element_bytes)));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides, static_cast<int64_t>(place(address) / element_bytes));
  return view;
}

ByteViewPool::Lease::Lease(ByteViewPool& pool, std::unique_ptr<ByteViews> views)
    : pool_(pool), views_(std::move(views)) {}

ByteViewPool::Lease::~Lease() {
  views_->clear();
  const std::lock_guard lock(pool_.mutex_);
  pool_.idle_.push_back(std::move(views_));
}

ByteViewPool::Lease ByteViewPool::take() {
  std::unique_ptr<ByteViews> views;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      views = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  return {*this, views ? std::move(views) : std::make_unique<ByteViews>(device_)};
}

}  // namespace tdcopier
