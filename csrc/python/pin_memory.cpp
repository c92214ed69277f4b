// Refuses leaves that cannot be pinned, and counts for each storage how often it is pinned.
#include "python/pin_memory.h"

#include <ATen/Context.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "engine/leaves/mapped_leaves.h"
#include "python/array_leaf.h"
#include "python/device_argument.h"
#include "python/pair_walk.h"
#include "python/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

struct Fixed {
  size_t holders = 0;
  bool was_resizable = false;
};

// GIL: held.
std::unordered_map<const c10::StorageImpl*, Fixed>& fixed_storages() {
  static auto& all = *new std::unordered_map<const c10::StorageImpl*, Fixed>;
  return all;
}

void fix(c10::StorageImpl& storage) {
  Fixed& fixed = fixed_storages()[&storage];
  if (fixed.holders++ != 0) return;
  // Shared memory has no allocator: torch cannot resize it, whatever it says.
  fixed.was_resizable = storage.resizable() && storage.allocator() != nullptr;
  if (fixed.was_resizable) storage.set_resizable(false);
}

void unfix(c10::StorageImpl& storage) {
  const auto found = fixed_storages().find(&storage);
  if (--found->second.holders != 0) return;
  if (found->second.was_resizable) storage.set_resizable(true);
  fixed_storages().erase(found);
}

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

// The whole storage, even of a view: torch asks only whether its first byte is pinned.
PinnedRanges::Range memory_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.storage().data()), tensor.storage().nbytes()};
}

// Returns the array that has the memory of this one, and that of all other views of it.
py::object owner_of(py::handle array) {
  auto owner = py::reinterpret_borrow<py::object>(array);
  for (py::object base = owner.attr("base"); is_array_type(Py_TYPE(base.ptr()));) {
    owner = std::exchange(base, base.attr("base"));
  }
  return owner;
}

// Returns a tensor with the storage of the leaf, or of the array that it is a view of.
at::Tensor host_tensor(py::handle leaf, size_t number) {
  constexpr const char* kMapped = "is mapped from a file, which the system may write back and move";
  const bool is_array = is_array_type(Py_TYPE(leaf.ptr()));
  auto owner = py::reinterpret_borrow<py::object>(leaf);
  if (is_array) {
    owner = owner_of(leaf);
    if (is_mapped_array(owner.ptr())) throw PinningError(number, kMapped);
    const bool is_readable =
        classify_array(owner.ptr()) == ArrayKind::kConvertible && is_readable_array(owner.ptr());
    const auto* memory = is_readable ? memory_of_array(owner.ptr()).data : nullptr;
    if (is_readable) owner = tensor_from_array(owner.ptr());
    if (!is_readable || tensor_in(owner.ptr()).const_data_ptr() != memory) {
      throw PinningError(number, "is an array that torch cannot read in place");
    }
  }
  if (!is_tensor(owner.ptr())) throw PinningError(number, "has no memory that is known");
  const at::Tensor& tensor = tensor_in(owner.ptr());
  if (!tensor.device().is_cpu()) {
    throw PinningError(number, "is on " + tensor.device().str() + ": only host memory is pinned");
  }
  if (tensor.layout() != c10::kStrided || !tensor.has_storage() || tensor.is_nested()) {
    throw PinningError(number, "is not a strided tensor, so its memory is not one piece");
  }
  if (is_mapped_file(storage_of(tensor))) throw PinningError(number, kMapped);
  return tensor;
}

void synchronise_all(c10::DeviceType type) {
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
  load_numpy_types();
  const py::list leaves = pairs_with_paths(data, data);
  std::vector<at::Tensor> tensors;
  try {
    for (size_t i = 0; i < leaves.size(); ++i) {
      const py::tuple path_and_leaf = leaves[i];
      tensors.push_back(host_tensor(path_and_leaf[1], i));
    }
    pin(tensors);
  } catch (const PinningError& error) {
    const py::tuple path_and_leaf = leaves[error.range()];
    throw py::value_error("data" + path_and_leaf[0].cast<std::string>() + " " + error.what());
  }
}

// Keeps torch from resizing the storages first: other threads run while memory is pinned.
void PinnedMemory::pin(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) fix(storage_of(tensor));
  std::vector<PinnedRanges::Range> ranges;
  try {
    const py::gil_scoped_release no_gil;
    for (const at::Tensor& tensor : tensors) {
      const PinnedRanges::Range memory = memory_of(tensor);
      // By torch's own allocator of pinned memory, or by other code.
      const bool is_pinned =
          !memory.empty() && !PinnedRanges::has(memory.first(1)) && tensor.is_pinned();
      ranges.push_back(is_pinned ? PinnedRanges::Range() : memory);
    }
    ranges_ = std::make_unique<PinnedRanges>(device_, ranges);
  } catch (...) {
    for (const at::Tensor& tensor : tensors) unfix(storage_of(tensor));
    throw;
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (ranges[i].empty()) {
      unfix(storage_of(tensors[i]));
    } else {
      kept_.push_back(tensors[i]);
    }
  }
}

void PinnedMemory::close() {
  if (!ranges_) return;
  if (ranges_->is_of_this_process()) {
    const py::gil_scoped_release no_gil;
    synchronise_all(device_.type());
  }
  std::unique_ptr<PinnedRanges> ranges = std::move(ranges_);
  if (!ranges) return;  // another thread was faster
  {
    const py::gil_scoped_release no_gil;
    ranges.reset();
  }
  for (const at::Tensor& tensor : kept_) unfix(storage_of(tensor));
  kept_.clear();
}

// If a device cannot be asked whether it is done, the memory stays pinned for good.
PinnedMemory::~PinnedMemory() {
  try {
    close();
  } catch (...) {
    new std::vector<at::Tensor>(std::move(kept_));
    static_cast<void>(ranges_.release());
  }
}

}  // namespace tdcopier
