// One look at each pair, of the commonest kind first: two plain tensors whose bytes lie alike.
#include "python/sort_pairs.h"

#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "base/overlap.h"
#include "engine/stage.h"
#include "python/array_leaf.h"
#include "python/device_argument.h"
#include "python/pair_mistakes.h"
#include "python/pair_overlap.h"
#include "python/pair_walk.h"
#include "python/prefetch.h"
#include "python/torch_state.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// One end of a pair, where it is plain: memory, and the elements in it.
struct End {
  c10::Device device = c10::kCPU;
  std::byte* data = nullptr;
  c10::StorageImpl* storage = nullptr;  // of a tensor
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides_bytes;
};

// Two ways of stepping through elements are one if they agree wherever there is a step.
template <typename Strides, typename Others>
bool same_steps(at::IntArrayRef sizes, const Strides& strides, const Others& others) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != others[d]) return false;
  }
  return true;
}

// What a pair of plain tensors had in common with the next.
struct Usual {
  c10::DispatchKeySet source;
  c10::DispatchKeySet target;
  c10::Device from;
  c10::Device to;
  size_t group;
};

class Sorter {
 public:
  Sorter(py::handle source, py::handle destination)
      : source_(source),
        destination_(destination),
        mistakes_(source, destination),
        altered_(torch_is_altered()) {}

  SortedPairs run() {
    PairedTrees trees = pair_trees(source_, destination_);
    try {
      sort_all(std::move(trees));
    } catch (const py::value_error&) {
      check_delegated();  // the first mistake is told, and these leaves come before this one
      throw;
    }
    if (check_delegated()) {
      // Code of their classes may have moved the memory of others: where that is, is looked up when
      // no such code runs any more.
      note_users();
      sorted_ = {};
      usual_.reset();
      sort_all(pair_trees(source_, destination_));
    }
    refuse_overlap();
    sorted_.readers = std::move(readers_);
    sorted_.writers = std::move(writers_);
    return std::move(sorted_);
  }

 private:
  // Takes over the references.
  void sort_all(PairedTrees trees) {
    leaves_ = trees.leaves.size();
    sorted_.opaque = trees.opaque;
    for (number_ = 0; number_ < leaves_; ++number_) {
      prefetch_ahead(trees);
      LeafPair& pair = trees.leaves[number_];
      auto from = py::reinterpret_steal<py::object>(std::exchange(pair.source, nullptr));
      auto to = py::reinterpret_steal<py::object>(std::exchange(pair.destination, nullptr));
      sort_out(std::move(from), std::move(to));
    }
  }

  void prefetch_ahead(const PairedTrees& trees) const {
    const auto each = [&](size_t number, auto prefetch) {
      if (number >= leaves_) return;
      const LeafPair& pair = trees.leaves[number];
      if (THPVariable_CheckTypeExact(Py_TYPE(pair.source))) prefetch(pair.source);
      if (THPVariable_CheckTypeExact(Py_TYPE(pair.destination))) prefetch(pair.destination);
    };
    each(number_ + kTensorsAhead, prefetch_tensor);
    each(number_ + kStoragesAhead, prefetch_storage);
  }

  // Whether there are any, and no mistake among them.
  bool check_delegated() {
    if (sorted_.delegated.empty()) return false;
    const py::object mismatch = py::module_::import("tdcopier._into").attr("mismatch");
    for (const DelegatedPair& pair : sorted_.delegated) {
      const py::object wrong = mismatch(pair.source, pair.destination);
      if (wrong.is_none()) continue;
      number_ = pair.number;
      const py::tuple told = wrong;  // of the source, or None; of the destination
      const auto beside = told[1].cast<std::string>();
      if (told[0].is_none()) mistakes_.refuse(number_, "destination", beside);
      mistakes_.refuse_both(number_, told[0].cast<std::string>(), beside);
    }
    return true;
  }

  void note_users() {
    for (const DelegatedPair& pair : sorted_.delegated) {
      readers_.note(pair.source);
      writers_.note(pair.destination);
    }
  }

  void sort_out(py::object from, py::object to) {
    if (altered_) return delegate(std::move(from), std::move(to));
    if (THPVariable_CheckTypeExact(Py_TYPE(from.ptr())) &&
        THPVariable_CheckTypeExact(Py_TYPE(to.ptr())) && add_usual(from, to)) {
      return;
    }
    const bool tensors = is_plain_class(from.ptr()) && is_plain_class(to.ptr());
    if (tensors ? !add_tensors(from, to) : !add_any(from, to)) {
      delegate(std::move(from), std::move(to));
    }
  }

  // A tensor of torch's own class, or of one whose memory is that of a plain tensor.
  bool is_plain_class(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (THPVariable_CheckTypeExact(type)) return true;
    if (!THPVariable_Check(object)) return false;
    for (const auto& [known, plain] : classes_) {
      if (known == type) return plain;
    }
    const py::object answer =
        py::module_::import("tdcopier._into")
            .attr("is_plain_class")(py::handle(reinterpret_cast<PyObject*>(type)));
    classes_.emplace_back(type, answer.cast<bool>());
    return classes_.back().second;
  }

  c10::DispatchKeySet keys_of(c10::Device device) {
    for (const auto& [known, keys] : keys_) {
      if (known == device) return keys;
    }
    keys_.emplace_back(device, plain_tensor_keys(device));
    return keys_.back().second;
  }

  static bool is_reached(c10::Device device) {
    return device.is_cpu() || has_engine_transfers(device);
  }
  // Most leaves go the same way as the one before.
  bool is_moved(c10::Device from, c10::Device to) {
    if (way_ && way_->first == from && way_->second == to) return true;
    if (!is_reached(from) || !is_reached(to)) return false;
    if (!from.is_cpu() && !to.is_cpu() && from.type() != to.type()) return false;
    way_ = {from, to};
    return true;
  }

  // What is known of a pair with the same keys as one that add_tensors() took, between the same
  // devices: all but memory and shape. The path of nearly every leaf; false: to be looked at again.
  bool add_usual(py::object& from, py::object& to) {
    const c10::TensorImpl* source = THPVariable_Unpack(from.ptr()).unsafeGetTensorImpl();
    c10::TensorImpl* target = THPVariable_Unpack(to.ptr()).unsafeGetTensorImpl();
    if (!usual_ || source->key_set() != usual_->source || target->key_set() != usual_->target ||
        source->autograd_meta() != nullptr || target->autograd_meta() != nullptr ||
        !source->is_contiguous() || !target->is_contiguous() || source->device() != usual_->from ||
        target->device() != usual_->to || source->dtype() != target->dtype() ||
        source->sizes() != target->sizes()) {
      return false;
    }
    const uint64_t element_bytes = target->itemsize();
    const uint64_t bytes = static_cast<uint64_t>(target->numel()) * element_bytes;
    c10::StorageImpl* source_storage = source->unsafe_storage().unsafeGetStorageImpl();
    c10::StorageImpl* target_storage = target->unsafe_storage().unsafeGetStorageImpl();
    const uint64_t begin = static_cast<uint64_t>(source->storage_offset()) * element_bytes;
    const uint64_t target_begin = static_cast<uint64_t>(target->storage_offset()) * element_bytes;
    if (bytes == 0 || bytes > kMaxPackedLeafBytes || source_storage == nullptr ||
        target_storage == nullptr || begin + bytes > source_storage->nbytes() ||
        target_begin + bytes > target_storage->nbytes()) {
      return false;
    }
    const auto* data = static_cast<const std::byte*>(source_storage->data()) + begin;
    auto* target_data = static_cast<std::byte*>(target_storage->mutable_data()) + target_begin;
    const auto either =
        reinterpret_cast<uintptr_t>(data) | reinterpret_cast<uintptr_t>(target_data);
    if (data == target_data || either % element_bytes != 0) return false;
    IntoGroup& group = sorted_.groups[usual_->group];
    const c10::ScalarType dtype = c10::typeMetaToScalarType(target->dtype());
    group.pairs.leaves.add_bytes(data, dtype, bytes, static_cast<uint32_t>(element_bytes));
    group.pairs.destinations.add(target_data, target_storage, /*pinned=*/false);
    if (usual_->from.is_cpu() && mapped_files_.has(*source_storage)) group.note_mapped();
    sorted_.written.push_back(target);
    group.keep(number_, std::move(from), std::move(to));
    return true;
  }

  // False: it is left to torch.
  bool add_tensors(py::object& from, py::object& to) {
    const at::Tensor& source = THPVariable_Unpack(from.ptr());
    const at::Tensor& target = THPVariable_Unpack(to.ptr());
    mistakes_.check_writable(number_, target);
    const c10::Device device = source.device();
    const c10::Device target_device = target.device();
    if (!is_moved(device, target_device)) return false;
    const PlainTensor plain = look_at(source, keys_of(device));
    const PlainTensor target_plain = look_at(target, keys_of(target_device));
    mistakes_.check_storage(number_, plain, source, "source");
    mistakes_.check_storage(number_, target_plain, target, "destination");
    if (plain.packable != Packable::kYes || target_plain.packable != Packable::kYes) return false;
    c10::TensorImpl* impl = target.unsafeGetTensorImpl();
    const c10::TensorImpl* source_impl = source.unsafeGetTensorImpl();
    const at::IntArrayRef sizes = impl->sizes();
    const c10::ScalarType dtype = c10::typeMetaToScalarType(impl->dtype());
    if (source_impl->sizes() != sizes)
      mistakes_.refuse_shapes(number_, source_impl->sizes(), sizes);
    if (source_impl->dtype() != impl->dtype()) {
      mistakes_.refuse_dtypes(number_, c10::typeMetaToScalarType(source_impl->dtype()), dtype);
    }
    if (impl->numel() == 0) {
      note_written(impl, std::move(to));
      ++sorted_.empty;
      return true;
    }
    const auto* data = static_cast<const std::byte*>(plain.storage->data()) + plain.begin;
    auto* const target_data =
        static_cast<std::byte*>(target_plain.storage->mutable_data()) + target_plain.begin;
    const at::IntArrayRef strides = source_impl->strides();
    const bool alike = same_steps(sizes, strides, impl->strides());
    if (data == target_data && alike && device == target_device) {
      note_reused(end_of(target, target_data, target_plain.storage));
      return true;
    }
    // A device reads and writes whole elements.
    const uint64_t element_bytes = impl->itemsize();
    const auto is_aligned = [&](const std::byte* address, c10::Device where) {
      return where.is_cpu() || reinterpret_cast<uintptr_t>(address) % element_bytes == 0;
    };
    if (!is_aligned(data, device) || !is_aligned(target_data, target_device)) return false;
    IntoGroup& group = group_of(device, target_device);
    if (plain.dense && target_plain.dense && alike) {
      const uint64_t bytes = static_cast<uint64_t>(impl->numel()) * element_bytes;
      group.pairs.leaves.add_bytes(data, dtype, bytes, static_cast<uint32_t>(element_bytes));
      const bool large = bytes > kMaxPackedLeafBytes;
      const bool pinned = large && !device.is_cpu() && target_device.is_cpu() && target.is_pinned();
      group.pairs.destinations.add(target_data, target_plain.storage, pinned);
      usual_ = {source_impl->key_set(), impl->key_set(), device, target_device,
                static_cast<size_t>(&group - sorted_.groups.data())};
    } else {
      add_strided(group, end_of(source, const_cast<std::byte*>(data), plain.storage),
                  end_of(target, target_data, target_plain.storage));
    }
    if (device.is_cpu() && mapped_files_.has(*plain.storage)) group.note_mapped();
    sorted_.written.push_back(impl);
    group.keep(number_, std::move(from), std::move(to));
    return true;
  }

  static End end_of(const at::Tensor& tensor, std::byte* data, c10::StorageImpl* storage) {
    End end{tensor.device(),       data, storage, tensor.scalar_type(), tensor.sizes().vec(),
            tensor.strides().vec()};
    for (int64_t& stride : end.strides_bytes) stride *= static_cast<int64_t>(tensor.itemsize());
    return end;
  }

  // An array at one end at least, or a class that is not plain. False: it is left to torch.
  bool add_any(py::object& from, py::object& to) {
    const bool from_array = is_array_type(Py_TYPE(from.ptr()));
    const bool to_array = is_array_type(Py_TYPE(to.ptr()));
    if (!(from_array || is_plain_class(from.ptr())) || !(to_array || is_plain_class(to.ptr()))) {
      return false;
    }
    if (to_array && !is_readable_array(to.ptr())) return false;
    if (from_array && !is_readable_array(from.ptr())) {
      return false;  // numpy, or torch, knows what its elements are
    }
    End source;
    End target;
    if (!see(from, from_array, /*written=*/false, source)) return false;
    if (!see(to, to_array, /*written=*/true, target)) return false;
    if (!is_moved(source.device, target.device)) return false;
    if (source.sizes != target.sizes) mistakes_.refuse_shapes(number_, source.sizes, target.sizes);
    if (source.dtype != target.dtype) mistakes_.refuse_dtypes(number_, source.dtype, target.dtype);
    if (source.device == target.device && source.data == target.data &&
        same_steps(source.sizes, source.strides_bytes, target.strides_bytes)) {
      note_reused(target);
      return true;
    }
    IntoGroup& group = group_of(source.device, target.device);
    add_strided(group, source, target);
    const bool mapped = from_array ? is_mapped_array(from.ptr())
                                   : source.device.is_cpu() && is_mapped_file(*source.storage);
    if (mapped) group.note_mapped();
    if (!to_array) sorted_.written.push_back(THPVariable_Unpack(to.ptr()).unsafeGetTensorImpl());
    group.keep(number_, std::move(from), std::move(to));
    return true;
  }

  bool see(const py::object& leaf, bool is_array, bool written, End& end) {
    if (is_array) {
      ArrayMemory memory = memory_of_array(leaf.ptr());
      if (written && !memory.writeable) {
        mistakes_.refuse(number_, "destination",
                         " is a read-only array: give one that may be written, such as a copy");
      }
      end = {c10::kCPU,
             memory.data,
             nullptr,
             memory.dtype,
             std::move(memory.sizes),
             std::move(memory.strides_bytes)};
      return true;
    }
    const at::Tensor& tensor = THPVariable_Unpack(leaf.ptr());
    if (written) mistakes_.check_writable(number_, tensor);
    if (!is_reached(tensor.device())) return false;
    const PlainTensor plain = look_at(tensor, keys_of(tensor.device()));
    mistakes_.check_storage(number_, plain, tensor, written ? "destination" : "source");
    if (plain.packable != Packable::kYes || tensor.numel() == 0) return false;
    const void* memory = written ? plain.storage->mutable_data() : plain.storage->data();
    auto* const data = static_cast<std::byte*>(const_cast<void*>(memory)) + plain.begin;
    if (!tensor.device().is_cpu() && reinterpret_cast<uintptr_t>(data) % tensor.itemsize() != 0) {
      return false;
    }
    end = end_of(tensor, data, plain.storage);
    return true;
  }

  // Of any steps at both ends: in between, the elements lie as they do at the destination, without
  // its gaps.
  void add_strided(IntoGroup& group, const End& source, const End& target) {
    std::vector<int64_t> order = target.strides_bytes;  // only which is longer counts
    for (int64_t& stride : order) stride = std::abs(stride);
    const std::vector<int64_t> dense = at::infer_dense_strides(target.sizes, order);
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(target.dtype));
    std::vector<int64_t> dense_bytes = dense;
    for (int64_t& stride : dense_bytes) stride *= element_bytes;
    LeafPairs& pairs = group.pairs;
    if (same_steps(source.sizes, source.strides_bytes, dense_bytes)) {
      pairs.leaves.add(source.data, source.dtype, source.sizes, dense);
    } else {
      pairs.leaves.add_strided(source.data, source.dtype, source.sizes, dense,
                               source.strides_bytes);
    }
    if (same_steps(target.sizes, target.strides_bytes, dense_bytes)) {
      pairs.destinations.add(target.data, target.storage, /*pinned=*/false);
      return;
    }
    const Leaf& leaf = pairs.leaves[pairs.leaves.size() - 1];
    if (overlaps_itself(dims_as_they_arrive(pairs.leaves, leaf, target.strides_bytes),
                        static_cast<uint64_t>(element_bytes))) {
      mistakes_.refuse(
          number_, "destination",
          " has elements that share memory (was it made with expand() or as_strided()?): give "
          "one with memory for each, such as a clone()");
    }
    pairs.destinations.add_strided(target.data, target.storage, target.strides_bytes);
  }

  // What it holds is wanted at the end.
  void note_reused(const End& end) {
    Area area{end.data, c10::elementSize(end.dtype), /*written=*/false, {}};
    for (size_t d = 0; d < end.sizes.size(); ++d) {
      area.dims.push_back({end.sizes[d], end.strides_bytes[d]});
    }
    sorted_.reused.push_back({end.device, std::move(area), number_});
  }

  IntoGroup& group_of(c10::Device from, c10::Device to) {
    for (IntoGroup& group : sorted_.groups) {
      if (group.pairs.leaves.device() == from && group.destination == to) return group;
    }
    sorted_.groups.push_back({to,
                              {LeafTable(from), {}},
                              std::make_shared<PySources>(),
                              std::make_shared<PySources>(),
                              {},
                              {}});
    IntoGroup& made = sorted_.groups.back();
    made.pairs.leaves.reserve(leaves_);
    made.pairs.destinations.reserve(leaves_);
    made.sources->reserve(leaves_);
    made.destinations->reserve(leaves_);
    made.numbers.reserve(leaves_);
    return made;
  }

  void note_written(c10::TensorImpl* impl, py::object owner) {
    sorted_.written.push_back(impl);
    sorted_.kept.push_back(std::move(owner));
  }

  void delegate(py::object from, py::object to) {
    sorted_.delegated.push_back({std::move(from), std::move(to), number_});
  }

  void refuse_overlap() {
    const auto found = find_shared_memory(sorted_, leaves_);
    if (found) mistakes_.refuse_sharing(found->first, found->second);
  }

  const py::handle source_;
  const py::handle destination_;
  const PairMistakes mistakes_;
  const bool altered_;
  size_t leaves_ = 0;
  size_t number_ = 0;  // of the pair in hand
  std::optional<std::pair<c10::Device, c10::Device>> way_;
  std::optional<Usual> usual_;
  MappedFiles mapped_files_;
  std::vector<std::pair<PyTypeObject*, bool>> classes_;
  std::vector<std::pair<c10::Device, c10::DispatchKeySet>> keys_;
  Users readers_;
  Users writers_;
  SortedPairs sorted_;
};

}  // namespace

SortedPairs sort_pairs(py::handle source, py::handle destination) {
  return Sorter(source, destination).run();
}

}  // namespace tdcopier
