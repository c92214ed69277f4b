// A nested batch as one run of bytes in host memory: a header, the layout, and the body.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/byte_format.h"
#include "python/walk/parcel_layout.h"

namespace tdcopier {

// The body begins at a multiple of this, counted from the first byte of the parcel.
inline constexpr uint64_t kParcelAlignmentBytes = 64;

// The class tdcopier.Parcel. GIL: held for every member.
class Parcel {
 public:
  // `bytes` has the whole parcel from its first byte on.
  Parcel(std::shared_ptr<const ParcelLayout> layout, c10::Storage bytes, uint64_t body_begin)
      : layout_(std::move(layout)), bytes_(std::move(bytes)), body_begin_(body_begin) {}

  // Makes a parcel of a copy of bytes of any origin. `bytes`: a tensor, (n,) uint8, contiguous, on
  // the host. Throws: TypeError if it is not; ValueError if its memory is too short;
  // MalformedBytes; as read_layout().
  static std::unique_ptr<Parcel> from_bytes(pybind11::handle bytes, pybind11::handle unpickle);

  // Returns the parcel if it is one, or null.
  static const Parcel* in(PyObject* object);

  const ParcelLayout& layout() const { return *layout_; }
  const std::byte* body() const {
    return static_cast<const std::byte*>(bytes_.data()) + body_begin_;
  }
  // (n,) uint8: all bytes, in the parcel's own memory. Resizing or sharing it leaves the parcel as
  // it is.
  at::Tensor bytes() const;

  // Builds the tree, of views of the parcel, which they keep alive. Runs Python code for custom
  // containers.
  pybind11::object tree() const;

 private:
  std::shared_ptr<const ParcelLayout> layout_;
  c10::Storage bytes_;
  uint64_t body_begin_;
};

// Writes the header of a parcel with such a layout, and the layout, and returns where its body
// begins.
uint64_t write_head(ByteWriter& to, std::span<const std::byte> layout, uint64_t body_bytes);

}  // namespace tdcopier
