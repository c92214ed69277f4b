// A nested batch as one run of bytes: a header, the layout, and the body.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/byte_format.h"
#include "python/walk/parcel_layout.h"

namespace tdcopier {

// The body begins at a multiple of this, counted from the first byte of the parcel.
inline constexpr uint64_t kParcelAlignmentBytes = 64;
// The place of a byte that is 0 in each parcel: the highest one of the version.
inline constexpr int64_t kZeroByteOfHead = 15;

struct ParcelTraits {
  bool may_unpickle;          // its bytes are trusted
  bool is_read_only = false;  // so views of its memory would end the process when written to
  bool is_mapped = false;     // its memory is a file, and reading it may wait for a disk
  bool is_owned = false;      // no one else has its memory
};

// The class tdcopier.Parcel. GIL: held for every member.
class Parcel {
 public:
  // `bytes` has the whole parcel, and nothing else, on the host or a device.
  Parcel(std::shared_ptr<const ParcelLayout> layout, c10::Storage bytes, uint64_t body_begin,
         ParcelTraits traits)
      : layout_(std::move(layout)),
        bytes_(std::move(bytes)),
        body_begin_(body_begin),
        traits_(traits) {}

  // Makes a parcel of bytes of any origin. `head`: those before the body, if they are known on the
  // host; else they are read from the bytes. Throws: MalformedBytes, also if they have a pickle and
  // are not trusted; as read_layout().
  static std::unique_ptr<Parcel> read(c10::Storage bytes, ParcelTraits traits,
                                      std::span<const std::byte> head = {});

  // Returns the parcel if it is one, or null.
  static const Parcel* in(PyObject* object);

  const ParcelLayout& layout() const { return *layout_; }
  c10::Device device() const { return bytes_.device(); }
  const c10::Storage& bytes() const { return bytes_; }
  const ParcelTraits& traits() const { return traits_; }
  std::span<const std::byte> body() const {
    return {static_cast<const std::byte*>(bytes_.data()) + body_begin_, layout_->body_bytes()};
  }
  bool needs_pickle() const { return !layout_->pickled.is_none(); }
  bool is_pinned() const;
  // Keep the bytes before the body on the host, of a parcel on a device.
  void keep_head(std::span<const std::byte> head) { head_.assign(head.begin(), head.end()); }
  std::span<const std::byte> head() const { return head_; }  // empty: they are not kept

  // Builds the tree. On the host its leaves are views of the parcel, which they keep alive. They
  // are views of a copy if the parcel is read-only, and, `for_caller`, in pinned memory of torch's
  // if it is in a slab that is pinned: of that memory torch knows which streams read it. On a
  // device they have memory of their own, written on the current stream, since views of several
  // dtypes in one storage cannot be saved; but they are views of an owned parcel if they have one
  // dtype. Runs Python code for custom containers, and unpickles.
  pybind11::object tree(bool for_caller) const;

 private:
  std::shared_ptr<const ParcelLayout> layout_;
  c10::Storage bytes_;
  uint64_t body_begin_;
  ParcelTraits traits_;
  std::vector<std::byte> head_;
};

// Writes the header of a parcel with such a layout, and the layout, and returns where its body
// begins.
uint64_t write_head(ByteWriter& to, std::span<const std::byte> layout, uint64_t body_bytes);

// Returns new memory of the host.
c10::Storage new_host_memory(uint64_t bytes);

// Returns a uint8 tensor over the whole storage.
at::Tensor tensor_over(const c10::Storage& bytes);

}  // namespace tdcopier
