// The header is four numbers of 8 bytes: what the bytes are, the version of the format, and the
// sizes of the layout and of the whole parcel.
#include "python/walk/parcel.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Device.h>

#include <algorithm>
#include <utility>

#include "engine/device/byte_tensor.h"
#include "engine/device/graph_capture.h"
#include "engine/device/pinned_ranges.h"
#include "engine/device/slab.h"
#include "engine/leaves/leaf.h"
#include "engine/leaves/result.h"
#include "python/runtime/hooks.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/sources.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

constexpr uint64_t kMagic = 0x4C45435241504454;  // "TDPARCEL"
constexpr uint64_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 32;
constexpr uint64_t kFirstBytesOfDevice = 16 * 1024;

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

// Returns torch's allocator of pinned memory, or null.
c10::Allocator* pinned_memory() {
  const auto type = at::getAccelerator();
  return type ? at::getHostAllocator(*type) : nullptr;
}

c10::Storage copy_of(std::span<const std::byte> bytes, c10::Allocator* memory) {
  c10::Storage made =
      memory == nullptr ? new_host_memory(bytes.size())
                        : c10::Storage(c10::Storage::use_byte_size_t(), bytes.size(),
                                       memory->allocate(bytes.size()), memory, /*resizable=*/true);
  std::ranges::copy(bytes, static_cast<std::byte*>(made.mutable_data()));
  return made;
}

// Returns the first bytes, up to `count`, in memory of their own: others may write to the parcel.
std::vector<std::byte> first_bytes(const c10::Storage& bytes, uint64_t count) {
  std::vector<std::byte> made(std::min<uint64_t>(count, bytes.nbytes()));
  if (bytes.device().is_cpu()) {
    std::copy_n(static_cast<const std::byte*>(bytes.data()), made.size(), made.begin());
  } else if (!made.empty()) {
    const auto size = static_cast<int64_t>(made.size());
    const at::Tensor on_host = tensor_over(bytes).narrow(0, 0, size).cpu();
    std::copy_n(static_cast<const std::byte*>(on_host.const_data_ptr()), made.size(), made.begin());
  }
  return made;
}

// Copies the body to the chunks of a result on the same device, on the current stream.
void copy_within_device(std::span<const std::byte> body, const PackPlan& plan, Result& result) {
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
  const c10::InferenceMode mode;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const ChunkPlan& chunk = plan.chunks[i];
    if (chunk.bytes == 0) continue;
    const at::Tensor from = bytes_at(result.device(), body.data() + chunk.begin, chunk.bytes);
    bytes_at(result.device(), result.address(i), chunk.bytes).copy_(from);
  }
}

bool have_one_dtype(const LeafTable& leaves) {
  return std::ranges::all_of(leaves.all(),
                             [&](const Leaf& leaf) { return leaf.dtype == leaves[0].dtype; });
}

bool fits(PyObject* value, PickledPlace::Needs needs) {
  switch (needs) {
    case PickledPlace::Needs::kNothing:
      return true;
    case PickledPlace::Needs::kClass:
      return PyType_Check(value);
    case PickledPlace::Needs::kDict:
      return PyDict_Check(value);
    case PickledPlace::Needs::kEntry:
      return !PyType_Check(value) && PyObject_HasAttrString(value, "to") == 1;
  }
  Py_UNREACHABLE();
}

// Puts unpickled values in their places.
void fill_in(TreeSpec& spec, const ParcelLayout& layout, const py::list& values) {
  for (const PickledPlace& each : layout.places) {
    if (each.value >= values.size()) throw MalformedBytes("a pickled value that is not there");
    const py::object value = values[each.value];
    if (!fits(value.ptr(), each.needs))
      throw MalformedBytes("a pickled value is of the wrong type");
    each.is_key ? spec.replace_key(each.place, value) : spec.replace_value(each.place, value);
  }
}

}  // namespace

c10::Storage new_host_memory(uint64_t bytes) {
  c10::Allocator* const allocator = c10::GetAllocator(c10::kCPU);
  return {c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), allocator->allocate(bytes),
          allocator, /*resizable=*/true};
}

at::Tensor tensor_over(const c10::Storage& bytes) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(bytes), plain_key_set(bytes.device()), c10::scalarTypeToTypeMeta(c10::kByte));
  made.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes.nbytes())});
  return made;
}

uint64_t write_head(ByteWriter& to, std::span<const std::byte> layout, uint64_t body_bytes) {
  const uint64_t body_begin = align_up(kHeaderBytes + layout.size(), kParcelAlignmentBytes);
  to.fixed64(kMagic);
  to.fixed64(kVersion);
  to.fixed64(layout.size());
  to.fixed64(body_begin + body_bytes);
  to.bytes(layout);
  while (to.written().size() < body_begin) to.byte(0);
  return body_begin;
}

std::unique_ptr<Parcel> Parcel::read(c10::Storage bytes, ParcelTraits traits,
                                     std::span<const std::byte> head) {
  const uint64_t total = bytes.nbytes();
  const bool is_on_device = !bytes.device().is_cpu();
  std::vector<std::byte> own;
  if (head.empty()) {  // of a device as many as most have, since each read waits for it
    own = first_bytes(bytes, is_on_device ? kFirstBytesOfDevice : kHeaderBytes);
    head = own;
  }
  if (head.size() < kHeaderBytes) throw MalformedBytes("the bytes end too early");
  ByteReader from(head);
  if (from.fixed64() != kMagic) throw MalformedBytes("the bytes are no parcel");
  if (from.fixed64() != kVersion) throw MalformedBytes("the parcel has an unknown version");
  const uint64_t layout_bytes = from.fixed64();
  if (from.fixed64() != total) throw MalformedBytes("a parcel has another size than it says");
  if (layout_bytes > total - kHeaderBytes) throw MalformedBytes("the bytes end too early");
  if (head.size() < kHeaderBytes + layout_bytes) {
    own = first_bytes(bytes, kHeaderBytes + layout_bytes);
    head = own;
  }
  std::shared_ptr<const ParcelLayout> layout =
      read_layout(head.subspan(kHeaderBytes, layout_bytes), total, traits.may_unpickle);
  if (!layout->pickled.is_none() && !traits.may_unpickle) {
    hooks().refuse_pickle(layout->path_of_pickled(), layout->pickled);
  }
  const uint64_t body_begin = align_up(kHeaderBytes + layout_bytes, kParcelAlignmentBytes);
  if (body_begin + layout->body_bytes() != total) {
    throw MalformedBytes("the leaves need another number of bytes than the parcel has");
  }
  return std::make_unique<Parcel>(std::move(layout), std::move(bytes), body_begin, traits);
}

const Parcel* Parcel::in(PyObject* object) {
  static const auto* const type =
      reinterpret_cast<PyTypeObject*>(py::type::of<Parcel>().release().ptr());
  if (!PyObject_TypeCheck(object, const_cast<PyTypeObject*>(type))) return nullptr;
  return py::handle(object).cast<const Parcel*>();
}

bool Parcel::is_pinned() const {
  return device().is_cpu() && !body().empty() && tdcopier::is_pinned(body());
}

py::object Parcel::tree(bool for_caller) const {
  release_returned_sources();
  const RelaxedCapture relaxed(device().type());  // of another thread
  LeafTable leaves(device());
  leaves.add_placed(layout_->leaves, *layout_->plan, nullptr);
  MemoryOf memory{.device = device()};
  if (device().is_cpu()) {
    const bool hides = for_caller && !Slab::note_views_unless_pinned(bytes_);
    if (!for_caller) Slab::note_views(bytes_);
    const bool copies = traits_.is_read_only || hides;
    memory.image = copies ? copy_of(body(), hides ? pinned_memory() : nullptr) : bytes_;
    memory.image_begin = copies ? 0 : body_begin_;
  } else if (traits_.is_owned && have_one_dtype(layout_->leaves)) {
    memory.image = bytes_;
    memory.image_begin = body_begin_;
  }
  Result result(memory, std::make_shared<const LeafTable>(std::move(leaves)), layout_->plan);
  result.allocate();
  if (!memory.image) copy_within_device(body(), *layout_->plan, result);
  Views views(result);
  const py::object own_device = py::reinterpret_steal<py::object>(THPDevice_New(device()));
  if (!needs_pickle() && device().is_cpu()) return layout_->spec.unflatten(views);
  TreeSpec spec;
  spec.append(layout_->spec, parcel_device().ptr(), own_device.ptr());
  if (needs_pickle()) {
    py::list of_values;
    for (size_t i = layout_->tree_leaves(); i < layout_->leaves.size(); ++i) {
      of_values.append(py::reinterpret_steal<py::object>(views.take(0, static_cast<uint32_t>(i))));
    }
    fill_in(spec, *layout_, hooks().load_values(layout_->pickled, of_values));
  }
  return spec.unflatten(views);
}

}  // namespace tdcopier
