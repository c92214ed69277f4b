// Looks at each pair once. The fast path is for two plain tensors with the same layout.
#include "python/walk/sort_pairs.h"

#include <c10/core/DispatchKeySet.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/overlap.h"
#include "python/runtime/array_leaf.h"
#include "python/runtime/cache_prefetch.h"
#include "python/runtime/hooks.h"
#include "python/runtime/torch_state.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/delegated_pairs.h"
#include "python/walk/into_group.h"
#include "python/walk/pair_leaf.h"
#include "python/walk/pair_overlap.h"
#include "python/walk/row_leaves.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Returns whether two tensors have the same shape and are dense in the same order of dimensions.
bool are_alike(const c10::TensorImpl& a, const c10::TensorImpl& b) {
  if (a.sizes() != b.sizes()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.is_non_overlapping_and_dense() && a.strides() == b.strides();
}

// Properties of the last pair of plain tensors, which most of the next pairs share.
struct LastPlainPair {
  c10::DispatchKeySet source;
  c10::DispatchKeySet target;
  c10::Device from;
  c10::Device to;
  size_t group;
};

class Sorter {
 public:
  Sorter(py::handle source, py::handle destination, PairNames names, TablesOfPairs tables,
         bool list_opaque)
      : source_(source),
        destination_(destination),
        names_(names),
        tables_(tables),
        rows_(tables.rows),
        list_opaque_(list_opaque),
        altered_(is_mode_active()),
        leaf_reader_(tables, [this](bool written) { return path(number_, written); }) {}

  SortedPairs run() {
    try {
      sort_all();
    } catch (const std::runtime_error&) {
      check_delegated();  // reports mistakes in delegated leaves first: they come before this one
      throw;
    }
    check_delegated();
    if (!sorted_.delegated.empty()) {
      for (const DelegatedPair& pair : sorted_.delegated) {
        readers_.note(pair.source);
        writers_.note(pair.destination);
      }
      // The code of their classes may have moved the memory of other leaves. So all addresses are
      // looked up again, and no such code runs any more.
      sort_all();
      note_delegated_memory();
    }
    refuse_shared_memory();
    const bool may_repeat = rows_ == nullptr || tables_.are_sources || !rows_->index();
    const auto twice = may_repeat ? std::nullopt : repeated_row(rows_->index()->rows);
    if (twice) {
      throw py::value_error(
          "row " + rows_->named(*twice) +
          " is in the index more than once: the order of its writes is undefined");
    }
    sorted_.readers = std::move(readers_);
    sorted_.writers = std::move(writers_);
    return std::move(sorted_);
  }

 private:
  void note_delegated_memory() {
    if (rows_ != nullptr) return;  // only some rows of a table are read or written
    for (OtherArea& each : areas_of_delegated(sorted_.delegated)) {
      number_ = each.number;
      if (each.area.written && overlaps_itself(each.area.dims, each.area.bytes)) {
        refuse(/*written=*/true, kSharesItsMemory);
      }
      if (tied_ && tied_->is_delegated_again(number_)) continue;
      sorted_.others.push_back(std::move(each));
    }
  }

  // Looks for tied pairs only if some memory is shared, because nearly no trees have any.
  void refuse_shared_memory() {
    if (!find_shared_memory(sorted_, leaves_)) return;
    tied_.emplace(sorted_.delegated);
    sort_all();
    note_delegated_memory();
    const auto shared = find_shared_memory(sorted_, leaves_);
    if (!shared) return;
    const auto& [first, second] = *shared;
    const char* const why =
        first.written && second.written
            ? " share memory: only tied leaves may, which have the same address, shape, strides "
              "and dtype, and are tied in the source too. Views of one tensor, such as x and "
              "x.t(), do not count as tied: leave one out of both trees if the other fills it, or "
              "give a clone() of one"
            : " share memory: the memory of a destination must not belong to another leaf too; "
              "give a clone() of one";
    throw py::value_error(path(first.number, first.written) + " and " +
                          path(second.number, second.written) + why);
  }

  void sort_all() {
    sorted_ = {};
    last_plain_.reset();
    PairedTrees trees = pair_trees(source_, destination_, names_, list_opaque_);
    leaves_ = trees.leaves.size();
    sorted_.kept.reserve(leaves_);
    sorted_.opaque = trees.opaque;
    sorted_.opaque_differences = trees.opaque_differences;
    sorted_.opaque_pairs = std::move(trees.opaque_pairs);
    for (number_ = 0; number_ < leaves_; ++number_) {
      prefetch_ahead(trees);
      LeafPair& pair = trees.leaves[number_];
      auto from = py::reinterpret_steal<py::object>(std::exchange(pair.source, nullptr));
      auto to = py::reinterpret_steal<py::object>(std::exchange(pair.destination, nullptr));
      sort_out(std::move(from), std::move(to));
    }
  }

  TDCOPIER_PREFETCH void prefetch_ahead(const PairedTrees& trees) const {
    if (number_ + tensors_ahead_ < leaves_) {
      const LeafPair& pair = trees.leaves[number_ + tensors_ahead_];
      if (is_plain_tensor_class(Py_TYPE(pair.source))) prefetch_tensor(pair.source);
      if (is_plain_tensor_class(Py_TYPE(pair.destination))) prefetch_tensor(pair.destination);
    }
    if (number_ + storages_ahead_ < leaves_) {
      const LeafPair& pair = trees.leaves[number_ + storages_ahead_];
      if (is_plain_tensor_class(Py_TYPE(pair.source))) prefetch_storage(pair.source);
      if (is_plain_tensor_class(Py_TYPE(pair.destination))) prefetch_storage(pair.destination);
    }
  }

  void check_delegated() const {
    check_delegated_pairs(sorted_.delegated, tables_,
                          [this](size_t number, bool written) { return path(number, written); });
  }

  void sort_out(py::object from, py::object to) {
    if (rows_ != nullptr) {
      from = as_tensor(std::move(from), /*written=*/false);
      to = as_tensor(std::move(to), /*written=*/true);
      const py::object& table = tables_.are_sources ? from : to;
      const auto mistake = rows_->mistake_in(tensor_in(table.ptr()));
      if (mistake) refuse(/*written=*/!tables_.are_sources, *mistake);
    }
    if (altered_ || !((!tied_ && add_like_last(from, to)) || add(from, to))) {
      sorted_.delegated.push_back({std::move(from), std::move(to), number_});
    }
  }

  // Returns the leaf if it is a tensor, or makes a tensor of an array: only tensors have rows.
  py::object as_tensor(py::object leaf, bool written) const {
    if (is_tensor(leaf.ptr())) return leaf;
    py::object made = hooks().table_as_tensor(leaf, written);
    if (PyUnicode_Check(made.ptr())) refuse(written, made.cast<std::string>());
    return made;
  }

  bool have_same_shape(const PlainLeaf& source, const PlainLeaf& target) const {
    if (source.table) return rows_->shape_in(source.sizes) == target.sizes;
    if (target.table) return rows_->shape_in(target.sizes) == source.sizes;
    return source.sizes == target.sizes;
  }

  // Fast path of nearly every leaf: adds a pair with the same key sets and devices as one that
  // add() took, of which only memory and shape remain to be checked. Returns false if add() must
  // look at it.
  bool add_like_last(py::object& from, py::object& to) {
    if (!last_plain_ || !is_plain_tensor_class(Py_TYPE(from.ptr())) ||
        !is_plain_tensor_class(Py_TYPE(to.ptr()))) {
      return false;
    }
    const at::Tensor& source_tensor = tensor_in(from.ptr());
    const at::Tensor& target_tensor = tensor_in(to.ptr());
    const c10::TensorImpl* source = source_tensor.unsafeGetTensorImpl();
    c10::TensorImpl* target = target_tensor.unsafeGetTensorImpl();
    if (source->key_set() != last_plain_->source || target->key_set() != last_plain_->target ||
        source->device() != last_plain_->from || target->device() != last_plain_->to ||
        source->dtype() != target->dtype() || !are_alike(*source, *target) ||
        (source->autograd_meta() != nullptr && keeps_gradient(source_tensor)) ||
        (target->autograd_meta() != nullptr && keeps_gradient(target_tensor))) {
      return false;
    }
    const uint64_t element_bytes = target->itemsize();
    const uint64_t bytes = static_cast<uint64_t>(target->numel()) * element_bytes;
    c10::StorageImpl* source_storage = source->unsafe_storage().unsafeGetStorageImpl();
    c10::StorageImpl* target_storage = target->unsafe_storage().unsafeGetStorageImpl();
    const uint64_t begin = static_cast<uint64_t>(source->storage_offset()) * element_bytes;
    const uint64_t target_begin = static_cast<uint64_t>(target->storage_offset()) * element_bytes;
    if (bytes == 0 || bytes > kMaxPackedLeafBytes || source_storage == nullptr ||
        target_storage == nullptr || begin + bytes > accessible_bytes(*source_storage) ||
        target_begin + bytes > accessible_bytes(*target_storage)) {
      return false;
    }
    const auto* data = static_cast<const std::byte*>(source_storage->data()) + begin;
    auto* target_data = static_cast<std::byte*>(target_storage->mutable_data()) + target_begin;
    const auto either =
        reinterpret_cast<uintptr_t>(data) | reinterpret_cast<uintptr_t>(target_data);
    if (data == target_data || either % element_bytes != 0) return false;
    IntoGroup& group = sorted_.groups[last_plain_->group];
    const c10::ScalarType dtype = c10::typeMetaToScalarType(target->dtype());
    group.pairs.leaves.add_bytes(data, dtype, bytes, static_cast<uint32_t>(element_bytes));
    group.pairs.destinations.add(target_data, target_storage, /*pinned=*/false);
    if (last_plain_->from.is_cpu() && mapped_files_.has(*source_storage)) group.note_mapped();
    keep(group, std::move(from), std::move(to), target);
    return true;
  }

  // Adds any pair. Returns false if it is delegated to torch, or does not fit, which
  // check_delegated() reports.
  bool add(py::object& from, py::object& to) {
    const std::optional<PlainLeaf> source = leaf_reader_.read(from.ptr(), /*written=*/false);
    const std::optional<PlainLeaf> target = leaf_reader_.read(to.ptr(), /*written=*/true);
    if (!source || !target || !is_moved(source->device, target->device)) return false;
    if (rows_ != nullptr && !source->table && !target->table) return false;
    if (!have_same_shape(*source, *target) || source->dtype != target->dtype) return false;
    const bool is_tensor = target->storage != nullptr;
    c10::TensorImpl* const written =  // its version is bumped
        is_tensor ? tensor_in(to.ptr()).unsafeGetTensorImpl() : nullptr;
    if ((source->table ? *target : *source).bytes() == 0) {
      note_written(written, std::move(to));
      ++sorted_.empty;
      return true;
    }
    const bool alike = rows_ == nullptr && source->has_steps(target->strides_bytes);
    if (alike && source->data == target->data && source->device == target->device) {
      note_reused(*target);
      return true;
    }
    if (!source->is_aligned() || !target->is_aligned()) return false;
    if (tied_ && !tied_->is_delegated(number_) && tied_->is_tied(from, to)) {
      note_written(written, std::move(to));
      ++sorted_.reused;
      return true;
    }
    if (rows_ != nullptr) return add_rows(*source, *target, from, to);
    IntoGroup& group = group_of(source->device, target->device);
    DestinationTable& destinations = group.pairs.destinations;
    if (alike && source->dense && target->dense) {
      group.add_source(*source);
      const bool pinned = source->bytes() > kMaxPackedLeafBytes && !source->device.is_cpu() &&
                          target->device.is_cpu() && is_pinned({target->data, source->bytes()});
      destinations.add(target->data, target->storage, pinned);
      if (is_tensor && source->storage != nullptr) {
        last_plain_ = {tensor_in(from.ptr()).key_set(), written->key_set(), source->device,
                       target->device, static_cast<size_t>(&group - sorted_.groups.data())};
      }
    } else if (!group.add_strided(*source, *target)) {
      refuse(/*written=*/true, kSharesItsMemory);
    }
    const bool mapped = source->storage == nullptr
                            ? is_mapped_array(from.ptr())
                            : source->device.is_cpu() && mapped_files_.has(*source->storage);
    if (mapped) group.note_mapped();
    keep(group, std::move(from), std::move(to), written);
    return true;
  }

  // Adds a pair of which one end is a table.
  bool add_rows(const PlainLeaf& source, const PlainLeaf& target, py::object& from,
                py::object& to) {
    const at::Tensor& table = tensor_in((source.table ? from : to).ptr());
    const c10::Device mover = source.table ? target.device : source.device;
    const InPlace in_place = mover.is_cpu() ? InPlace::kNo : rows_->in_place(table, mover);
    const bool is_by_numbers = in_place != InPlace::kNo && mover == rows_->numbers_device();
    if (rows_->are_numbers_on_device() && !is_by_numbers) return false;
    IntoGroup& group = group_of(source.device, target.device, in_place != InPlace::kNo);
    if (source.table) {
      if (rows_->add(group.pairs.leaves, table) != Packable::kYes) {
        if (group.pairs.leaves.size() == 0) sorted_.groups.pop_back();
        return false;
      }
      group.pairs.destinations.add(target.data, target.storage, /*pinned=*/false);
      if (mapped_files_.has(*source.storage)) {
        rows_->note_mapped(group.pairs.leaves, group.mapped);
      }
    } else {
      group.add_source(source);
      group.pairs.destinations.add_rows(target.data, target.storage, *target.table, rows_->index());
    }
    if (in_place == InPlace::kRegistered) {
      group.in_place->registered.push_back(table.storage().data());
    }
    c10::TensorImpl* const written = tensor_in(to.ptr()).unsafeGetTensorImpl();
    keep(group, std::move(from), std::move(to), written);
    return true;
  }

  // Keeps alive the pair that was added to the group's tables last: of a destination that is a
  // tensor, its memory, and during the call the tensor. `written`: that tensor; null for an array.
  void keep(IntoGroup& group, py::object from, py::object to, c10::TensorImpl* written) {
    group.numbers.push_back(static_cast<uint32_t>(number_));
    group.sources->keep(from.release().ptr());
    if (written == nullptr) return group.destinations->keep(to.release().ptr());
    group.destinations->keep_memory(written->unsafe_storage());
    note_written(written, std::move(to));
  }

  // Lets the call bump the version of a destination. `written`: as above.
  void note_written(c10::TensorImpl* written, py::object to) {
    if (written == nullptr) return;
    sorted_.written.push_back(written);
    sorted_.kept.push_back(std::move(to));
  }

  static bool is_moved(c10::Device from, c10::Device to) {
    return from.is_cpu() || to.is_cpu() || from.type() == to.type();
  }

  // Notes that the memory must keep its values.
  void note_reused(const PlainLeaf& end) {
    Area area{end.data, end.element_bytes(), /*written=*/false, {}};
    for (size_t d = 0; d < end.sizes.size(); ++d) {
      area.dims.push_back({end.sizes[d], end.strides_bytes[d]});
    }
    sorted_.others.push_back({end.device, std::move(area), number_});
    ++sorted_.reused;
  }

  IntoGroup& group_of(c10::Device from, c10::Device to, bool in_place = false) {
    for (IntoGroup& group : sorted_.groups) {
      if (group.pairs.leaves.device() == from && group.destination == to &&
          group.in_place.has_value() == in_place) {
        return group;
      }
    }
    sorted_.groups.push_back({to, {LeafTable(from), {}}});
    IntoGroup& made = sorted_.groups.back();
    made.reserve(leaves_);
    if (in_place) {
      made.in_place = rows_->pinned_tables();
      if (rows_->are_numbers_on_device()) made.sources->keep(rows_->numbers().inc_ref().ptr());
    }
    return made;
  }

  // Returns the path of one end of a pair.
  std::string path(size_t number, bool written) const {
    const std::string name = written ? names_.destination : names_.source;
    const auto steps = path_of_pair(source_, destination_, number);
    return steps ? name + *steps : "a leaf of " + name;
  }

  // Throws a ValueError about the current pair.
  [[noreturn]] void refuse(bool written, const std::string& why) const {
    throw py::value_error(path(number_, written) + why);
  }

  const py::handle source_;
  const py::handle destination_;
  const PairNames names_;
  const TablesOfPairs tables_;
  RowLeaves* const rows_;
  const bool list_opaque_;
  const bool altered_;
  const size_t tensors_ahead_ = prefetch_distance(kTensorsAhead);
  const size_t storages_ahead_ = prefetch_distance(kStoragesAhead);
  size_t leaves_ = 0;
  size_t number_ = 0;  // of the current pair
  std::optional<LastPlainPair> last_plain_;
  std::optional<TiedPairs> tied_;  // set once pairs are looked up again to drop those
  MappedFiles mapped_files_;
  PlainLeafReader leaf_reader_;
  LeafDevices readers_;
  LeafDevices writers_;
  SortedPairs sorted_;
};

}  // namespace

SortedPairs sort_pairs(py::handle source, py::handle destination, PairNames names,
                       TablesOfPairs tables, bool list_opaque) {
  return Sorter(source, destination, names, tables, list_opaque).run();
}

}  // namespace tdcopier
