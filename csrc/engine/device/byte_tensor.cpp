// Makes tensors directly from an implementation object: no dispatcher call, no view bookkeeping. A
// view is an offset into a storage that spans the address space, so that torch never takes it for
// memory of its own.
#include "engine/device/byte_tensor.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>

#include <limits>
#include <utility>

#include "base/internal_error.h"

namespace tdcopier {
namespace {

// Not 0, which torch takes for memory that was never allocated. A multiple of every element size.
constexpr uintptr_t kLowestAddress = 64;

c10::Storage address_space(c10::Device device) {
  return {c10::Storage::use_byte_size_t(),
          static_cast<size_t>(std::numeric_limits<int64_t>::max() - kLowestAddress),
          c10::DataPtr(reinterpret_cast<void*>(kLowestAddress), device),
          /*allocator=*/nullptr, /*resizable=*/false};
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

at::Tensor tensor_over(c10::Storage storage, c10::ScalarType dtype, at::IntArrayRef sizes,
                       at::IntArrayRef strides, int64_t offset) {
  const c10::DispatchKeySet keys = plain_key_set(storage.device());
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys,
                                                             c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

}  // namespace

c10::DispatchKeySet plain_key_set(c10::Device device) {
  return c10::DispatchKeySet(c10::computeDispatchKey(c10::ScalarType::Byte, c10::kStrided, device));
}

at::Tensor byte_tensor(c10::DataPtr memory, uint64_t bytes) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                       /*allocator=*/nullptr, /*resizable=*/false);
  return tensor_over(std::move(storage), c10::ScalarType::Byte, static_cast<int64_t>(bytes),
                     int64_t{1}, /*offset=*/0);
}

at::Tensor bytes_at(c10::Device device, const void* address, uint64_t bytes) {
  return elements_at(device, address, /*element_bytes=*/1, static_cast<int64_t>(bytes), int64_t{1});
}

at::Tensor elements_at(c10::Device device, const void* address, uint32_t element_bytes,
                       at::IntArrayRef sizes, at::IntArrayRef strides) {
  const uint64_t place = reinterpret_cast<uintptr_t>(address) - kLowestAddress;
  check_invariant(place % element_bytes == 0, "elements on a device are aligned");
  return tensor_over(address_space(device), integer_of(element_bytes), sizes, strides,
                     static_cast<int64_t>(place / element_bytes));
}

}  // namespace tdcopier
