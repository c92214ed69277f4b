// Prepares everything that may throw first, and then exchanges pointers.
#include "python/calls/storage_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "engine/device/byte_tensor.h"
#include "engine/device/recorded_streams.h"
#include "engine/leaves/leaf.h"
#include "engine/leaves/part_storage.h"
#include "engine/moves/gather_scatter.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

constexpr const char* kChanged =
    "another thread has changed the memory of a tensor, for example parked it, during this call";

using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;

// Allocates what raise_on_access() needs.
template <typename Impl>
void prepare_to_raise([[maybe_unused]] Impl& impl) {
  if constexpr (kCanRaise<Impl>) impl.get_extra_meta();
}

template <typename Impl>
void raise_on_access([[maybe_unused]] Impl& impl, [[maybe_unused]] std::string message) noexcept {
  if constexpr (kCanRaise<Impl>) {
    impl.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  }
}

template <typename Impl>
void allow_access([[maybe_unused]] Impl& impl) noexcept {
  if constexpr (kCanRaise<Impl>) impl.clear_data_ptr_access_error_msg_();
}

// Whether the storage has no memory. If kEmptyStoragesRaise, one that is parked keeps its size:
// then a view can be made of it, and what accesses the view raises the error that says so.
bool is_empty(c10::StorageImpl& impl) {
  return accessible_bytes(impl) == 0;
}

// Fills an empty place of a new list.
void set_item(const py::list& list, size_t i, at::Tensor tensor) {
  PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), wrap_tensor(std::move(tensor)));
}

// Requires: the storage is no lazy clone.
c10::DataPtr exchange(c10::StorageImpl& impl, c10::DataPtr memory, uint64_t bytes) noexcept {
  c10::DataPtr old = impl.set_data_ptr(std::move(memory));
  impl.set_nbytes(static_cast<size_t>(bytes));
  return old;
}

// Makes the allocator of the memory wait for the streams of its device before it reuses the memory.
// Returns false if the memory is not the allocator's.
bool record_on(const c10::DataPtr& memory, const std::vector<c10::Stream>& streams) {
  const c10::Device device = memory.device();
  const c10::DeleterFnPtr deleter = c10::GetAllocator(device.type())->raw_deleter();
  if (deleter == nullptr || memory.get_deleter() != deleter) return false;
  const c10::impl::VirtualGuardImpl backend(device.type());
  for (const c10::Stream& stream : streams) {
    if (stream.device() == device) backend.recordDataPtrOnStream(memory, stream);
  }
  return true;
}

}  // namespace

MemoryPlace place_of(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper,
                                           c10::DispatchKey::Functionalize});
  if (tensor.layout() != c10::kStrided || tensor.is_nested() || keys.has_any(kWrappers) ||
      !tensor.has_storage()) {
    return MemoryPlace::kUnknown;
  }
  const c10::Device device = tensor.device();
  if (device.is_cpu() || device.is_meta()) return MemoryPlace::kHost;
  return has_engine_transfers(device) ? MemoryPlace::kDevice : MemoryPlace::kOtherDevice;
}

at::Tensor over_bytes(const at::Tensor& bytes, const at::Tensor& tensor) {
  const auto skipped = bytes.storage_offset() / static_cast<int64_t>(tensor.itemsize());
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(bytes.storage()), plain_key_set(bytes.device()), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    skipped + tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

py::list parts_of_bytes(const at::Tensor& bytes, const std::vector<int64_t>& begins,
                        const std::vector<int64_t>& sizes) {
  const c10::DispatchKeySet keys = plain_key_set(bytes.device());
  py::list made(begins.size());
  for (size_t i = 0; i < begins.size(); ++i) {
    const int64_t size = sizes.at(i);
    const int64_t first = bytes.storage_offset() + begins[i];
    const bool is_own = bytes.is_cpu();
    at::Tensor part = at::detail::make_tensor<c10::TensorImpl>(
        is_own ? PartStorage::make(bytes.storage(), static_cast<uint64_t>(first),
                                   static_cast<uint64_t>(size))
               : c10::Storage(bytes.storage()),
        keys, bytes.dtype());
    part.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (!is_own) part.unsafeGetTensorImpl()->set_storage_offset(first);
    set_item(made, i, std::move(part));
  }
  return made;
}

at::Tensor empty_bytes(int64_t bytes, py::handle stream) {
  const c10::Stream its = parse_stream(stream, device_of_stream(stream).value());
  const c10::StreamGuard on_stream(its);
  return at::empty({bytes}, at::TensorOptions().dtype(c10::kByte).device(its.device()));
}

bool pack_bytes(const py::list& parts, const at::Tensor& chunk, const std::vector<int64_t>& begins,
                py::handle stream, bool record) {
  const c10::Stream its = parse_stream(stream, chunk.device());
  std::vector<ByteCopy> copies;
  copies.reserve(begins.size());
  auto* const memory = static_cast<std::byte*>(chunk.mutable_data_ptr());
  for (size_t i = 0; i < begins.size(); ++i) {
    const at::Tensor& part = tensor_in(parts[i].ptr());
    const bool fits = part.device() == chunk.device() && part.is_contiguous() && begins[i] >= 0 &&
                      begins[i] + part.numel() <= chunk.numel();
    if (!fits || part.scalar_type() != c10::kByte) {
      throw py::value_error("a part of a chunk is too large, or not of bytes on its device");
    }
    copies.push_back({static_cast<const std::byte*>(part.const_data_ptr()), memory + begins[i],
                      static_cast<uint64_t>(part.numel())});
  }
  bool are_recorded = record;
  for (size_t i = 0; record && i < begins.size(); ++i) {
    const c10::Storage& storage = tensor_in(parts[i].ptr()).storage();
    leave_to_parent(storage, storage.data_ptr().get_deleter());
    are_recorded &= record_on(storage.data_ptr(), {its});
  }
  const WithoutGil no_gil;
  const c10::StreamGuard on_stream(its);
  copy_within(its, copies);
  return are_recorded;
}

StorageMemory::StorageMemory(const py::list& tensors) {
  std::unordered_map<const c10::StorageImpl*, int64_t> known;
  known.reserve(tensors.size());
  numbers_.reserve(tensors.size());
  for (const py::handle object : tensors) {
    if (!is_tensor(object.ptr())) throw py::type_error("StorageMemory takes tensors");
    const at::Tensor& tensor = tensor_in(object.ptr());
    c10::StorageImpl* const impl = tensor.storage().unsafeGetStorageImpl();
    const uint64_t bytes = accessible_bytes(*impl);
    if (bytes == 0) {
      numbers_.push_back(tensor.numel() == 0 ? kNothing : kMissing);
      continue;
    }
    const auto [entry, is_new] = known.try_emplace(impl, static_cast<int64_t>(storages_.size()));
    numbers_.push_back(entry->second);
    if (!is_new) continue;
    impl->mutable_data();
    sizes_bytes_.push_back(bytes);
    storages_.emplace_back(tensor.storage().getWeakStorageImpl());
  }
}

py::list StorageMemory::tensors() const {
  py::list made(storages_.size());
  for (size_t i = 0; i < storages_.size(); ++i) {
    StorageRef impl = storages_[i].lock();
    if (!impl || accessible_bytes(*impl) != sizes_bytes_[i]) throw std::runtime_error(kChanged);
    const c10::DispatchKeySet keys = plain_key_set(impl->device());
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(impl)), keys, c10::scalarTypeToTypeMeta(c10::ScalarType::Byte));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(static_cast<int64_t>(sizes_bytes_[i]));
    set_item(made, i, std::move(tensor));
  }
  return made;
}

py::list StorageMemory::like(const py::list& tensors, const py::list& bytes) const {
  if (tensors.size() != numbers_.size() || bytes.size() != storages_.size()) {
    throw std::runtime_error("these are not the tensors of this object, or not their bytes");
  }
  py::list made(tensors.size());
  for (size_t i = 0; i < numbers_.size(); ++i) {
    const at::Tensor& tensor = tensor_in(tensors[i].ptr());
    set_item(made, i,
             numbers_[i] < 0
                 ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU))
                 : over_bytes(tensor_in(bytes[static_cast<size_t>(numbers_[i])].ptr()), tensor));
  }
  return made;
}

void StorageMemory::take_out(const std::vector<py::object>& users, const std::string& message) {
  if (is_out_) throw std::runtime_error("the memory of these storages is out already");
  std::vector<c10::Stream> streams;
  for (const py::object& user : users) {
    streams.push_back(parse_stream(user, device_of_stream(user).value()));
  }
  std::vector<StorageRef> impls;
  std::vector<std::string> messages(storages_.size(), message);
  std::vector<c10::DataPtr> freed;
  std::vector<c10::DataPtr> kept;
  std::vector<bool> is_kept;
  freed.reserve(storages_.size());
  kept.reserve(storages_.size());
  for (size_t i = 0; i < storages_.size(); ++i) {
    StorageRef impl = storages_[i].lock();
    if (impl) {
      if (accessible_bytes(*impl) != sizes_bytes_[i]) throw std::runtime_error(kChanged);
      impl->mutable_data();
      prepare_to_raise(*impl);
    }
    is_kept.push_back(impl && !record_on(impl->data_ptr(), streams));
    impls.push_back(std::move(impl));
  }
  // Nothing below throws.
  for (size_t i = 0; i < impls.size(); ++i) {
    if (!impls[i]) continue;
    c10::DataPtr none(nullptr, impls[i]->device());
    const uint64_t bytes = kEmptyStoragesRaise ? sizes_bytes_[i] : 0;
    (is_kept[i] ? kept : freed).push_back(exchange(*impls[i], std::move(none), bytes));
    raise_on_access(*impls[i], std::move(messages[i]));
  }
  kept_ = std::move(kept);
  is_out_ = true;
}

std::vector<bool> StorageMemory::are_waiting() const {
  std::vector<bool> waiting;
  for (const auto& storage : storages_) {
    const StorageRef impl = is_out_ ? storage.lock() : StorageRef();
    waiting.push_back(impl && is_empty(*impl));
  }
  return waiting;
}

void StorageMemory::put_in(const std::vector<py::object>& memory) {
  if (!is_out_ || memory.size() != storages_.size()) {
    throw std::runtime_error("there is no memory to put in, or not for every storage");
  }
  std::vector<StorageRef> from;
  std::vector<StorageRef> to;
  for (size_t i = 0; i < memory.size(); ++i) {
    StorageRef impl = storages_[i].lock();
    if (impl && !memory[i].is_none()) {
      const c10::Storage& storage = tensor_in(memory[i].ptr()).storage();
      if (!is_empty(*impl) || storage.nbytes() != sizes_bytes_[i] ||
          storage.device() != impl->device()) {
        throw std::runtime_error("memory does not fit the storage that it is for");
      }
      from.push_back(StorageRef::reclaim_copy(storage.unsafeGetStorageImpl()));
      // Streams were recorded when the memory was handed over.
      leave_to_parent(c10::Storage(impl), storage.data_ptr().get_deleter());
    } else {
      from.emplace_back();
    }
    to.push_back(std::move(impl));
  }
  // Nothing below throws.
  for (size_t i = 0; i < to.size(); ++i) {
    // A storage that was resized has memory again, and only this flag keeps it from being used.
    if (to[i] && (from[i] || !is_empty(*to[i]))) allow_access(*to[i]);
    if (!from[i]) continue;
    c10::DataPtr none(nullptr, to[i]->device());
    exchange(*to[i], exchange(*from[i], std::move(none), 0), sizes_bytes_[i]);
    to[i]->set_received_cuda(false);  // it may have been another process's memory before
  }
  is_out_ = false;
}

}  // namespace tdcopier
