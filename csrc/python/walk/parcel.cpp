// The header is four numbers of 8 bytes: what the bytes are, the version of the format, and the
// sizes of the layout and of the whole parcel.
#include "python/walk/parcel.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "engine/device/byte_tensor.h"
#include "engine/leaves/leaf.h"
#include "engine/leaves/part_storage.h"
#include "engine/leaves/result.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

constexpr uint64_t kMagic = 0x4C45435241504454;  // "TDPARCEL"
constexpr uint64_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 32;

// The tensors over the body, made in one go.
class Views final : public LeafTensors {
 public:
  explicit Views(const Result& result) {
    made_.resize(result.leaves());
    result.make_outputs(0, result.leaves(), made_);
  }

  PyObject* take(uint32_t /*group*/, uint32_t leaf) override {
    return wrap_tensor(std::move(made_[leaf]));
  }

 private:
  RecycledVector<at::Tensor> made_;
};

// Returns new memory of the host with these bytes: that of others may be resized, shared or freed.
c10::Storage copy_of(std::span<const std::byte> bytes) {
  c10::Allocator* const allocator = c10::GetAllocator(c10::kCPU);
  c10::Storage made(c10::Storage::use_byte_size_t(), bytes.size(),
                    allocator->allocate(bytes.size()), allocator, /*resizable=*/true);
  std::ranges::copy(bytes, static_cast<std::byte*>(made.mutable_data()));
  return made;
}

}  // namespace

uint64_t write_head(ByteWriter& to, std::span<const std::byte> layout, uint64_t body_bytes) {
  const uint64_t body_begin = align_up(kHeaderBytes + layout.size(), kParcelAlignmentBytes);
  to.fixed64(kMagic);
  to.fixed64(kVersion);
  to.fixed64(layout.size());
  to.fixed64(body_begin + body_bytes);
  to.bytes(layout);
  return body_begin;
}

std::unique_ptr<Parcel> Parcel::from_bytes(py::handle tensor, py::handle unpickle) {
  if (!is_tensor(tensor.ptr())) throw py::type_error("the bytes of a parcel are a tensor");
  const at::Tensor& bytes = tensor_in(tensor.ptr());
  const PlainTensor plain = look_at(bytes, plain_tensor_keys(c10::Device(c10::kCPU)));
  if (plain.packable == Packable::kShortStorage) {
    throw py::value_error("the tensor" + why_out_of_reach(bytes));
  }
  if (plain.packable != Packable::kYes || bytes.scalar_type() != c10::kByte || bytes.dim() != 1 ||
      !bytes.is_contiguous()) {
    throw py::type_error("the bytes of a parcel are a contiguous uint8 tensor of the host");
  }
  const std::span<const std::byte> all(
      static_cast<const std::byte*>(plain.storage->data()) + plain.begin,
      static_cast<size_t>(bytes.numel()));
  if (all.size() < kHeaderBytes) throw MalformedBytes("a parcel has at least 32 bytes");
  const std::vector<std::byte> header(all.begin(), all.begin() + kHeaderBytes);
  ByteReader from(header);
  if (from.fixed64() != kMagic) throw MalformedBytes("the bytes are no parcel");
  if (from.fixed64() != kVersion) throw MalformedBytes("the parcel has an unknown version");
  const uint64_t layout_bytes = from.fixed64();
  if (from.fixed64() != all.size()) throw MalformedBytes("a parcel has another size than it says");
  if (layout_bytes > all.size() - kHeaderBytes) throw MalformedBytes("the bytes end too early");
  const auto first = all.begin() + kHeaderBytes;
  const std::vector<std::byte> written(first, first + static_cast<ptrdiff_t>(layout_bytes));
  std::shared_ptr<const ParcelLayout> layout = read_layout(written, unpickle, all.size());
  const uint64_t body_begin = align_up(kHeaderBytes + layout_bytes, kParcelAlignmentBytes);
  if (body_begin + layout->body_bytes() != all.size()) {
    throw MalformedBytes("the leaves need another number of bytes than the parcel has");
  }
  return std::make_unique<Parcel>(std::move(layout), copy_of(all), body_begin);
}

const Parcel* Parcel::in(PyObject* object) {
  static const auto* const type =
      reinterpret_cast<PyTypeObject*>(py::type::of<Parcel>().release().ptr());
  if (!PyObject_TypeCheck(object, const_cast<PyTypeObject*>(type))) return nullptr;
  return py::handle(object).cast<const Parcel*>();
}

at::Tensor Parcel::bytes() const {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      PartStorage::make(bytes_, 0, bytes_.nbytes()), plain_key_set(bytes_.device()),
      c10::scalarTypeToTypeMeta(c10::kByte));
  made.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes_.nbytes())});
  return made;
}

py::object Parcel::tree() const {
  LeafTable leaves(c10::Device(c10::kCPU));
  leaves.add_placed(layout_->leaves, *layout_->plan, nullptr);
  Result result({.device = c10::Device(c10::kCPU), .image = bytes_, .image_begin = body_begin_},
                std::make_shared<const LeafTable>(std::move(leaves)), layout_->plan);
  result.allocate();
  Views views(result);
  return layout_->spec.unflatten(views);
}

}  // namespace tdcopier
