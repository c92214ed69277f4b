// Takes the device memory out of storages, and puts memory back, for `tdcopier.park()`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tdcopier {

// Whether this torch can make a storage raise an error of ours when its memory is asked for.
// Without it, torch itself raises one for most operations, because the storage has no bytes.
template <typename Impl>
constexpr bool kCanRaise = requires(Impl& impl) {
  impl.get_extra_meta();
  impl.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string());
  impl.clear_data_ptr_access_error_msg_();
};
inline constexpr bool kEmptyStoragesRaise = kCanRaise<c10::StorageImpl>;

// Where a tensor's memory is, for a caller that moves it as bytes.
enum class MemoryPlace : uint8_t {
  kUnknown,      // it is not one strided piece, or not the tensor's own
  kHost,         // the host, or nowhere (a meta tensor)
  kDevice,       // a device that the engine has transfers for
  kOtherDevice,  // any other device
};
MemoryPlace place_of(const at::Tensor& tensor);

// Returns a plain tensor with the dtype, shape, strides and conj and neg bits of `tensor`, over the
// memory of `bytes`, which has a copy of the storage of `tensor`. Requires: `bytes` is a uint8
// tensor, and begins at a multiple of the element size in its storage.
at::Tensor over_bytes(const at::Tensor& bytes, const at::Tensor& tensor);

// Returns bytes [begins[i], begins[i] + sizes[i]) of a uint8 tensor. On the host each has a storage
// of its own, which keeps the memory alive: saved alone, a part is no larger.
pybind11::list parts_of_bytes(const at::Tensor& bytes, const std::vector<int64_t>& begins,
                              const std::vector<int64_t>& sizes);

// Returns a new uint8 tensor of shape (bytes,) that is allocated on `stream`, a torch.Stream. No
// Python code runs while that stream is current. Throws: the allocator's error.
at::Tensor empty_bytes(int64_t bytes, pybind11::handle stream);

// Copies uint8 tensors of a device into `chunk`, another one there: each to the byte in `begins`.
// Enqueues it on `stream`, a torch.Stream. With `record`, the allocator waits for that stream
// before it reuses the memory of the parts. Returns whether it does for all of them. Throws:
// ValueError if a part does not fit, before anything is enqueued; c10::Error, if the device refuses
// work.
bool pack_bytes(const pybind11::list& parts, const at::Tensor& chunk,
                const std::vector<int64_t>& begins, pybind11::handle stream, bool record);

// The distinct storages of a list of tensors. Does not keep them alive: a storage that nothing else
// uses any more is gone. A change of all of them is one call that cannot be interrupted, and it is
// complete or, if it throws, nothing has changed. GIL: held for every member.
class StorageMemory {
 public:
  // Numbers of tensors without a storage in this object.
  static constexpr int64_t kNothing = -1;  // no bytes are needed
  static constexpr int64_t kMissing = -2;  // the storage has no memory, though the tensor needs it

  // Makes lazy clones real ones. Throws: the allocator's error. Requires: each tensor has a
  // storage, on a device.
  explicit StorageMemory(const pybind11::list& tensors);

  // By tensor: the number of its storage, kNothing or kMissing.
  const std::vector<int64_t>& numbers() const { return numbers_; }
  // By storage: its length when this object was made.
  const std::vector<uint64_t>& sizes_bytes() const { return sizes_bytes_; }
  // By storage: a new uint8 tensor of shape (bytes,) that shares it. Throws: RuntimeError if a
  // storage was changed since.
  pybind11::list tensors() const;
  // By tensor: one like it over the bytes of its storage (over_bytes()), or an empty one on the
  // host if no bytes are needed. `bytes`: by storage. Requires: the list that this was made from.
  pybind11::list like(const pybind11::list& tensors, const pybind11::list& bytes) const;

  // Leaves all storages without memory; if kEmptyStoragesRaise, they keep their size, else they
  // have 0 bytes. Their memory returns to the allocator, which reuses it only when what is enqueued
  // now on `users` has ended; other memory than the allocator's is kept until release_kept(). If
  // kEmptyStoragesRaise, any access to the memory of an empty storage then raises a RuntimeError
  // with `message`. Throws: RuntimeError if a storage was changed since.
  void take_out(const std::vector<pybind11::object>& users, const std::string& message);
  // Returns, by storage, whether it is alive and still empty: it then has to get memory.
  std::vector<bool> are_waiting() const;
  // Moves the memory of `memory` into the storages: by storage, a uint8 tensor of the length and on
  // the device of the storage, which is empty afterwards; or None, which leaves the storage as it
  // is. Throws: RuntimeError if one does not fit.
  void put_in(const std::vector<pybind11::object>& memory);
  // Releases the memory that take_out() could not give to an allocator. Requires: it has been read.
  void release_kept() noexcept { kept_.clear(); }

  // Whether take_out() has been called, and put_in() has not.
  bool is_out() const { return is_out_; }

 private:
  std::vector<int64_t> numbers_;
  std::vector<uint64_t> sizes_bytes_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::vector<c10::DataPtr> kept_;
  bool is_out_ = false;
};

}  // namespace tdcopier
