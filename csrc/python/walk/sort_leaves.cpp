// Looks up the addresses of leaves after the last foreign code has run, which might resize them.
#include "python/walk/sort_leaves.h"

#include <string>
#include <utility>

#include "engine/device/pinned_ranges.h"
#include "python/runtime/array_leaf.h"
#include "python/runtime/cache_prefetch.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/parcel.h"
#include "python/walk/row_leaves.h"

namespace py = pybind11;

namespace tdcopier {

LeafSorter::LeafSorter(c10::Device target, bool altered, bool delegates_all, RowLeaves* rows,
                       bool packs)
    : target_(target),
      altered_(altered),
      delegates_all_(delegates_all),
      packs_(packs),
      moves_from_host_(packs || has_engine_transfers(target)),
      rows_(rows),
      for_kernel_(target) {
  constexpr size_t kFewLeaves = 32;  // room for 32 leaves costs one allocation
  tensors_.reserve(kFewLeaves);
}

LeafSorter::~LeafSorter() {
  for (const Found& found : tensors_) Py_XDECREF(found.object);
  for (const Found& found : arrays_) Py_XDECREF(found.object);
  for (const Found& found : parcels_) Py_XDECREF(found.object);
  for (const Found& found : taken_) Py_XDECREF(found.object);
}

void LeafSorter::sort(FlatTree& flat, PyObject* data) {
  flat_ = &flat;
  data_ = data;

  for (Found& found : parcels_) sort_parcel(found);
  for (Found& found : arrays_) {
    const size_t group = group_of(c10::Device(c10::kCPU));
    LeafTable& leaves = flat_->groups[group].leaves;
    add_array_leaf(found.object, leaves);
    const Leaf& leaf = leaves[leaves.size() - 1];
    if (moves_from_host_ && !leaf.strided && leaf.bytes > kMaxPackedLeafBytes &&
        is_pinned({static_cast<const std::byte*>(leaf.data), leaf.bytes})) {
      leaves.note_pinned();
    }
    if (is_mapped_array(found.object)) flat_->groups[group].note_mapped();
    set_leaf(std::exchange(found.object, nullptr), found.node, group);
  }
  sort_tensors();
  sort_for_kernel();
  for (SourceGroup& group : flat_->groups) {
    if (group.leaves.size() != group.leaves_of_plan) group.plan = nullptr;
  }
}

void LeafSorter::sort_parcel(Found& found) {
  const Parcel& parcel = *Parcel::in(found.object);
  const ParcelLayout& layout = parcel.layout();
  PyObject* const object = std::exchange(found.object, nullptr);
  if (layout.leaves.size() == 0) return Py_DECREF(object);
  const size_t group = group_of(parcel.device());
  SourceGroup& those = flat_->groups[group];
  const size_t first_leaf = those.leaves.size();
  const bool is_pinned = parcel.is_pinned();
  those.leaves.add_placed(layout.leaves, *layout.plan, parcel.body().data(), is_pinned);
  if (parcel.traits().is_mapped) those.mapped.note(parcel.body());
  those.sources->keep(object);
  those.plan = is_pinned ? layout.pinned_plan() : layout.plan;
  those.leaves_of_plan = first_leaf == 0 ? those.leaves.size() : 0;
  for (size_t i = 0; i < layout.spec.nodes(); ++i) {
    const TreeSpec::Node& node = layout.spec.node(i);
    if (node.kind != NodeKind::kLeaf) continue;
    flat_->spec.set_leaf(found.node + i, group, first_leaf + node.number);
  }
}

// Reads three places per tensor that are rarely in the cache after a training step; prefetching
// hides most of the misses.
void LeafSorter::sort_tensors() {
  const size_t later = prefetch_distance(kTensorsAhead);
  const size_t sooner = prefetch_distance(kStoragesAhead);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (i + later < tensors_.size()) prefetch_tensor(tensors_[i + later].object);
    if (i + sooner < tensors_.size()) prefetch_storage(tensors_[i + sooner].object);
    PyObject* const object = std::exchange(tensors_[i].object, nullptr);
    if (tensors_[i].is_table) {
      sort_table(object, tensors_[i].node, tensors_[i].is_mapped);
    } else {
      sort_tensor(object, tensors_[i].node);
    }
  }
}

// Adds the rows of a table, or reads them with torch if the engine cannot. Takes over a
// reference.
void LeafSorter::sort_table(PyObject* object, size_t node, bool is_mapped) {
  auto owned = py::reinterpret_steal<py::object>(object);
  const at::Tensor& table = tensor_in(object);
  if (const std::optional<std::string> mistake = rows_->mistake_in(table)) {
    refuse(node, *mistake);
  }
  if (!altered_ && table.device().is_cpu()) {
    const InPlace in_place = moves_from_host_ ? rows_->in_place(table, target_) : InPlace::kNo;
    const size_t group = group_of(c10::Device(c10::kCPU), in_place != InPlace::kNo);
    SourceGroup& those = flat_->groups[group];
    const bool is_read = in_place != InPlace::kNo || !rows_->are_numbers_on_device();
    const Packable packable = is_read ? rows_->add(those.leaves, table) : Packable::kNoRows;
    if (packable == Packable::kShortStorage) refuse_short_storage(table, node);
    if (packable == Packable::kYes) {
      if (in_place == InPlace::kRegistered) {
        those.in_place->registered.push_back(table.storage().data());
      }
      if (is_mapped || mapped_files_.has(table)) rows_->note_mapped(those.leaves, those.mapped);
      return set_leaf(owned.release().ptr(), node, group);
    }
    if (those.leaves.size() == 0) flat_->groups.pop_back();
  }
  if (table.device().is_cpu() && rows_->are_numbers_on_device()) {
    refuse(node, " cannot be read by the device that has the index: " +
                     RowLeaves::needs_for_device() + ". Give index.cpu()");
  }
  py::object rows = rows_->read(object);  // through a torch mode, if one is active
  const bool is_plain_class = is_plain_tensor_class(Py_TYPE(rows.ptr()));
  if (!is_plain_class)
    return flat_->delegate(rows.release().ptr(),
                           {0, node, altered_ ? WhyDelegated::kTorchMode : WhyDelegated::kClass});
  sort_tensor(rows.release().ptr(), node);
}

// Decides how to treat a tensor of torch's own class. Takes over a reference.
void LeafSorter::sort_tensor(PyObject* object, size_t node) {
  auto owned = py::reinterpret_steal<py::object>(object);
  const at::Tensor& tensor = tensor_in(object);
  const c10::Device device = tensor.device();
  if (delegates_all_) {
    return flat_->delegate(owned.release().ptr(), {0, node, WhyDelegated::kTorchMode});
  }
  if (device == target_ && !packs_) {
    flat_->spec.set_ready(node, owned.release().ptr());
    ++flat_->reused;
    return;
  }
  if (!is_moved_from(device)) {
    return flat_->delegate(owned.release().ptr(), {0, node, WhyDelegated::kDevice});
  }
  // Rows that were read by their own code are staged with those that threads read.
  if (device.is_cpu() && rows_ == nullptr && !packs_ && for_kernel_.take(tensor)) {
    taken_.push_back({object, node, false, false});
    owned.release();
    return;
  }
  add_leaf(owned.release().ptr(), node, group_of(device));
}

// Sorts the leaves that a kernel may read, which are staged like others if there are too few.
void LeafSorter::sort_for_kernel() {
  const bool by_kernel = for_kernel_.are_enough();
  for (Found& found : taken_) {
    const size_t group = group_of(c10::Device(c10::kCPU), by_kernel);
    add_leaf(std::exchange(found.object, nullptr), found.node, group);
  }
}

// Adds a tensor to the leaves of a group, or delegates it. Takes over a reference.
void LeafSorter::add_leaf(PyObject* object, size_t node, size_t group) {
  auto owned = py::reinterpret_steal<py::object>(object);
  const at::Tensor& tensor = tensor_in(object);
  const c10::Device device = tensor.device();
  const Packable packable = flat_->groups[group].leaves.add_if_packable(tensor);
  switch (packable) {
    case Packable::kYes:
      if (device.is_cpu() && mapped_files_.has(tensor)) flat_->groups[group].note_mapped();
      // Not for tables: leaves made of their rows may come between the leaves of a series.
      if (device.is_cpu() && rows_ == nullptr && !packs_)
        pinned_.note(flat_->groups[group].leaves, tensor);
      return set_leaf(owned.release().ptr(), node, group);
    case Packable::kShortStorage:
      refuse_short_storage(tensor, node);
    default:
      // No job for a group without leaves. Only the group that was just made can be empty.
      if (flat_->groups[group].leaves.size() == 0) flat_->groups.pop_back();
      return flat_->delegate(owned.release().ptr(), {0, node, WhyDelegated::kNotPlain, packable});
  }
}

void LeafSorter::refuse_short_storage(const at::Tensor& tensor, size_t node) const {
  refuse(node, why_out_of_reach(tensor) + ": nothing can read it");
}

void LeafSorter::refuse(size_t node, const std::string& why) const {
  throw py::value_error(path_of(data_, node, target_).value_or("a tensor in data") + why);
}

bool LeafSorter::is_moved_from(c10::Device device) const {
  if (device.is_cpu()) return moves_from_host_;
  return has_engine_transfers(device) && (target_.is_cpu() || target_.type() == device.type());
}

size_t LeafSorter::group_of(c10::Device device, bool in_place) {
  const auto is_it = [&](const SourceGroup& group) {
    return group.leaves.device() == device && group.in_place.has_value() == in_place;
  };
  if (last_group_ < flat_->groups.size() && is_it(flat_->groups[last_group_])) return last_group_;
  for (last_group_ = 0; last_group_ < flat_->groups.size(); ++last_group_) {
    if (is_it(flat_->groups[last_group_])) return last_group_;
  }
  flat_->groups.push_back({LeafTable(device), std::make_shared<PySources>(), {}});
  SourceGroup& made = flat_->groups.back();
  made.leaves.reserve(tensors_.size());
  made.sources->reserve(tensors_.size() + 1);
  if (in_place) {
    made.in_place = rows_ != nullptr ? rows_->pinned_tables() : for_kernel_.take_tables();
    if (rows_ != nullptr && rows_->are_numbers_on_device())
      made.sources->keep(rows_->numbers().inc_ref().ptr());
  }
  return last_group_;
}

// Points the node at the last leaf of the group's table. Takes over a reference.
void LeafSorter::set_leaf(PyObject* object, size_t node, size_t group) {
  flat_->spec.set_leaf(node, group, flat_->groups[group].leaves.size() - 1);
  flat_->groups[group].sources->keep(object);
}

}  // namespace tdcopier
