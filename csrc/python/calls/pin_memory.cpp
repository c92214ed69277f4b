// Refuses leaves that cannot be pinned, and shares the ownership of their memory.
#include "python/calls/pin_memory.h"

#include <ATen/Context.h>
#include <ATen/MapAllocator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "base/forks.h"
#include "base/residency.h"
#include "engine/device/graph_capture.h"
#include "engine/leaves/mapped_leaves.h"
#include "engine/leaves/part_storage.h"
#include "python/runtime/array_leaf.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/pair_walk.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

constexpr const char* kMapped = "is mapped from a file, which the system may write back and move";
constexpr const char* kUnknown = "has no memory that is known";

// Memory, and what owns it.
struct Owned {
  PinnedRanges::Range memory;
  std::shared_ptr<const void> owner;  // null: the memory is pinned already, and not by us
};

void drop_share(void* share) {
  delete static_cast<std::shared_ptr<c10::DataPtr>*>(share);
}

// Makes the storage one of several owners of its memory, and returns another. A storage may get
// other memory: torch does so when it is resized, moved to shared memory, or written as a lazy
// clone.
std::shared_ptr<const void> share_memory_of(const c10::Storage& storage) {
  // These own shared memory for good, and are recognised by their deleter.
  if (at::MapAllocator::fromDataPtr(storage.data_ptr()) != nullptr) {
    return std::make_shared<c10::Storage>(storage);
  }
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  const c10::DataPtr& memory = impl.data_ptr();
  if (memory.get_deleter() == &drop_share) {
    return *static_cast<std::shared_ptr<c10::DataPtr>*>(memory.get_context());
  }
  auto owner = std::make_shared<c10::DataPtr>();
  auto share = std::make_unique<std::shared_ptr<c10::DataPtr>>(owner);
  c10::DataPtr shared(memory.get(), share.release(), &drop_share, memory.device());
  *owner = impl.set_data_ptr(std::move(shared));
  return owner;
}

// The whole storage, even of a view: torch asks only whether its first byte is pinned. Of a packed
// result on the host the whole chunk, which one transfer may read.
Owned memory_of(const c10::Storage& storage, size_t number, const FileMappings& files) {
  const c10::Storage chunk = PartStorage::chunk_of(*storage.unsafeGetStorageImpl());
  const c10::Storage& whole = chunk ? chunk : storage;
  // Makes a lazy clone a real one.
  const PinnedRanges::Range memory{static_cast<const std::byte*>(whole.mutable_data()),
                                   whole.nbytes()};
  if (memory.empty()) return {};
  if (memory.data() == nullptr) throw PinningError(number, kUnknown);
  if (is_mapped_file(*whole.unsafeGetStorageImpl()) || files.has(memory.data())) {
    throw PinningError(number, kMapped);
  }
  if (is_pinned_by_others(memory.first(1))) return {};
  if (chunk) return {memory, std::make_shared<c10::Storage>(chunk)};
  return {memory, share_memory_of(storage)};
}

// Returns the object that has the memory of an array, and that of all other views of it: an array,
// or a tensor.
py::object owner_of(py::handle array) {
  auto owner = py::reinterpret_borrow<py::object>(array);
  while (is_array_type(Py_TYPE(owner.ptr()))) {
    py::object base = owner.attr("base");
    if (!is_array_type(Py_TYPE(base.ptr())) && !is_tensor(base.ptr())) break;
    owner = std::move(base);
  }
  return owner;
}

// Returns the memory of an array that no other array or tensor owns.
Owned memory_of_array_leaf(py::handle array, size_t number, const FileMappings& files) {
  if (is_mapped_array(array.ptr())) throw PinningError(number, kMapped);
  const bool is_readable =
      classify_array(array.ptr()) == ArrayKind::kConvertible && is_readable_array(array.ptr());
  const std::byte* const first = is_readable ? memory_of_array(array.ptr()).data : nullptr;
  const py::object made = is_readable ? tensor_from_array(array.ptr()) : py::object();
  if (!is_readable || tensor_in(made.ptr()).const_data_ptr() != first) {
    throw PinningError(number, "is an array that torch cannot read in place, or a view of one");
  }
  return memory_of(tensor_in(made.ptr()).storage(), number, files);
}

Owned memory_of_leaf(py::handle leaf, size_t number, const FileMappings& files) {
  const bool is_array = is_array_type(Py_TYPE(leaf.ptr()));
  if (is_array && leaf.attr("size").cast<size_t>() == 0) return {};
  const py::object owner = is_array ? owner_of(leaf) : py::reinterpret_borrow<py::object>(leaf);
  if (is_array_type(Py_TYPE(owner.ptr()))) return memory_of_array_leaf(owner, number, files);
  if (is_array && !is_tensor(owner.ptr())) throw PinningError(number, kUnknown);
  if (!is_tensor(owner.ptr())) {
    throw PinningError(number, std::string("is a ") + Py_TYPE(leaf.ptr())->tp_name +
                                   ", and only its own `.to` knows its tensors: give them, of a "
                                   "module list(module.parameters())");
  }
  const at::Tensor& tensor = tensor_in(owner.ptr());
  if (!tensor.device().is_cpu()) {
    throw PinningError(number, "is on " + tensor.device().str() + ": only host memory is pinned");
  }
  if (tensor.layout() != c10::kStrided || !tensor.has_storage() || tensor.is_nested()) {
    throw PinningError(number, "is not a strided tensor, so its memory is not one piece");
  }
  return memory_of(tensor.storage(), number, files);
}

void synchronise_all(c10::DeviceType type) {
  const RelaxedCapture relaxed(type);
  const c10::impl::VirtualGuardImpl backend(type);
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  for (c10::DeviceIndex i = 0; i < backend.deviceCount(); ++i) {
    if (hooks.hasPrimaryContext(i)) backend.synchronizeDevice(i);
  }
}

}  // namespace

PinnedMemory::PinnedMemory(py::handle data, py::handle device) : device_(parse_device(device)) {
  if (!has_engine_transfers(device_)) {
    throw py::value_error("memory is pinned for a device; got " + device_.str());
  }
  if (fork_generation() != 0) {
    throw std::runtime_error("a forked child cannot use a device, nor pin memory for it");
  }
  load_numpy_types();
  const py::list leaves = pairs_with_paths(data, data, {"data", "data"}, /*lists_objects=*/true);
  if (leaves.empty() && !py::isinstance<py::list>(data) && !py::isinstance<py::tuple>(data) &&
      !py::isinstance<py::dict>(data)) {
    throw py::value_error("data has no tensor or array");
  }
  const FileMappings files;
  std::vector<PinnedRanges::Range> ranges;
  try {
    for (size_t i = 0; i < leaves.size(); ++i) {
      const py::tuple path_and_leaf = leaves[i];
      Owned found = memory_of_leaf(path_and_leaf[1], i, files);
      ranges.push_back(found.memory);
      if (found.owner) kept_.push_back(std::move(found.owner));
    }
    const WithoutGil no_gil;
    ranges_ = std::make_unique<PinnedRanges>(device_, ranges);
  } catch (const PinningError& error) {
    const py::tuple path_and_leaf = leaves[error.range()];
    throw py::value_error("data" + path_and_leaf[0].cast<std::string>() + " " + error.what());
  }
}

void PinnedMemory::close() {
  std::vector<std::shared_ptr<const void>> kept;  // dropped last: that may run Python code
  {
    const WithoutGil no_gil;
    const std::lock_guard lock(closing_);
    if (!ranges_) return;
    if (ranges_->is_of_this_process()) {
      ranges_->end_use();
      try {
        synchronise_all(device_.type());
      } catch (...) {
        ranges_->resume_use();
        throw;
      }
    }
    ranges_.reset();
    kept = std::move(kept_);
  }
}

// If a device cannot be asked whether it is done, the memory stays pinned for good.
PinnedMemory::~PinnedMemory() {
  try {
    close();
  } catch (...) {
    new std::vector<std::shared_ptr<const void>>(std::move(kept_));
    static_cast<void>(ranges_.release());
  }
}

}  // namespace tdcopier
