// Tensors that stand for any bytes of a device, re-pointed from copy to copy instead of made anew.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace tdcopier {

// Two lists of views of one device, of equal length: what is read and what is written. A view owns
// nothing; whoever uses it sees to it that the memory stays. Requires, for making and for using
// them: InferenceMode, so that no version counter or gradient is involved.
class ByteViews {
 public:
  explicit ByteViews(c10::Device device);

  // Appends (bytes,) uint8 at both addresses.
  void add(const void* from, const void* to, uint64_t bytes);
  void clear() { used_ = 0; }

  at::TensorList from() const { return {from_.data(), used_}; }
  at::TensorList to() const { return {to_.data(), used_}; }

  // A tensor of its own over elements of `element_bytes` (1, 2, 4, 8 or 16) at `address`, which is
  // a multiple of that.
  at::Tensor strided(const void* address, uint32_t element_bytes, at::IntArrayRef sizes,
                     at::IntArrayRef strides) const;

 private:
  const c10::Storage everything_;  // spans the device's whole address space
  std::vector<at::Tensor> from_;
  std::vector<at::Tensor> to_;
  size_t used_ = 0;
};

// Thread: any. Lifetime: outlives every lease (device state is never destroyed).
class ByteViewPool {
 public:
  explicit ByteViewPool(c10::Device device) : device_(device) {}
  ByteViewPool(const ByteViewPool&) = delete;
  ByteViewPool& operator=(const ByteViewPool&) = delete;

  // Views for the caller alone, until the lease goes.
  class Lease {
   public:
    Lease(ByteViewPool& pool, std::unique_ptr<ByteViews> views);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ByteViews& operator*() { return *views_; }
    ByteViews* operator->() { return views_.get(); }

   private:
    ByteViewPool& pool_;
    std::unique_ptr<ByteViews> views_;
  };
  Lease take();

 private:
  const c10::Device device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<ByteViews>> idle_;  // guarded by mutex_
};

}  // namespace tdcopier
