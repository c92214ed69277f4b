// The walk: tests for tensors and plain containers by exact type first, and looks up everything
// else by its class. It runs for a copy, for the rows of tables, and for messages. sort_leaves.cpp
// decides how each tensor is treated.
#include "python/walk/flatten.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "python/runtime/array_leaf.h"
#include "python/runtime/cache_prefetch.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/torch_state.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/parcel.h"
#include "python/walk/path.h"
#include "python/walk/row_leaves.h"
#include "python/walk/sort_leaves.h"
#include "python/walk/tensordict_node.h"
#include "python/walk/value_kind.h"

namespace py = pybind11;

namespace tdcopier {

// Not in an unnamed namespace: the compiler would inline the rare cases into the path of the common
// leaf, which costs 3 %.
class Flattener {
 public:
  // `paths`, if given, receives the path of every node, and every leaf is delegated: such a walk is
  // for messages rather than for a copy.
  // `rows`, if given: every leaf is a table from which rows are read, see row_leaves.h. With
  // `paths` too, only what is left to its own indexing is read.
  // `packs`: leaves that are on the target, the host, are moved too.
  Flattener(c10::Device target, std::vector<std::string>* paths, RowLeaves* rows = nullptr,
            bool packs = false)
      : target_(target),
        rows_(rows),
        packs_(packs),
        altered_(is_mode_active()),
        delegates_all_(altered_ || paths != nullptr),
        paths_(paths),
        found_(target, altered_, delegates_all_, rows, packs),
        looks_({.target = target,
                .named = paths != nullptr,
                .left = altered_,
                .flatten = rows != nullptr ? rows->flatten() : py::object(),
                .unflatten = rows != nullptr ? rows->unflatten() : py::object(),
                .target_object =
                    packs ? py::reinterpret_borrow<py::object>(packing_device()) : py::object()}) {
    flat_.spec.reserve(kFewNodes);
  }
  Flattener(const Flattener&) = delete;
  Flattener& operator=(const Flattener&) = delete;

  FlatTree run(PyObject* data) {
    visit(data, 0);
    found_.sort(flat_, data);
    return std::move(flat_);
  }

 private:
  static constexpr size_t kFewNodes = 32;  // room for up to 32 nodes costs one allocation

  // Whether a value is part of a TensorDict or another collection of tensordict.
  enum class Place : uint8_t { kFree, kInTensorDict };

  void visit(PyObject* object, int depth) {
    const PyTypeObject* type = Py_TYPE(object);
    note_path(depth);
    if (is_plain_tensor_class(type)) {
      add_tensor(object);
    } else if (type == &PyDict_Type) {
      visit_dict(object, depth);
    } else if (type == &PyList_Type || type == &PyTuple_Type) {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
      flat_.spec.add(type == &PyList_Type ? NodeKind::kList : NodeKind::kTuple, count);
      prefetch_each(PySequence_Fast_ITEMS(object), count);
      visit_children(object, nullptr, PathStep::Kind::kIndex, depth);
    } else if (type == tensordict_) {
      visit_tensordict(object, depth, Place::kFree);
    } else if (ValueLooks::is_plain_opaque(type)) {
      add_opaque(object);
    } else {
      visit_rare(object, depth);
    }
  }

  // `children` is a list or a tuple. The code of a class further down may change it during the
  // walk.
  void visit_children(PyObject* children, PyObject* names, PathStep::Kind step, int depth,
                      Place place = Place::kFree) {
    path_.check_depth(depth, "data");
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(children);
    for (Py_ssize_t i = 0; i < count; ++i) {
      check_unchanged(i < PySequence_Fast_GET_SIZE(children), depth);
      path_[depth] = {step, names != nullptr ? PySequence_Fast_GET_ITEM(names, i) : nullptr, i};
      visit_kept(PySequence_Fast_GET_ITEM(children, i), depth + 1, place);
    }
    check_unchanged(count == PySequence_Fast_GET_SIZE(children), depth);
  }

  void visit_dict(PyObject* dict, int depth) {
    flat_.spec.add(NodeKind::kDict, PyDict_GET_SIZE(dict));
    visit_items(dict, depth, [&](PyObject* value) { visit_kept(value, depth + 1); });
  }

  // Calls `visit` for each value, after the node of the dict was added.
  template <typename Visit>
  void visit_items(PyObject* dict, int depth, Visit visit) {
    path_.check_depth(depth, "data");
    const Py_ssize_t count = PyDict_GET_SIZE(dict);
    Py_ssize_t position = is_prefetching() ? 0 : PY_SSIZE_T_MAX;  // which is after the last one
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(dict, &position, &key, &value) != 0) __builtin_prefetch(value);
    position = 0;
    Py_ssize_t seen = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      check_unchanged(++seen <= count, depth);
      flat_.spec.add_key(key);
      path_[depth] = {PathStep::Kind::kKey, key, 0};
      visit(value);
    }
    check_unchanged(seen == count, depth);
  }

  // A TensorDict that is not an entry of another one is left to its own `.to` if that would return
  // it as it is, or copy its one consolidated storage; otherwise it decides whether to lock the
  // result.
  void visit_tensordict(PyObject* object, int depth, Place place) {
    const std::optional<TensorDictNode> node = read_tensordict(object);
    if (!node) return add_seen(object, looks_.look_at_collection(object), depth);
    const bool is_root = place == Place::kFree;
    if (is_root && is_left(*node)) return add_delegated(object, WhyDelegated::kClass);
    flat_.spec.add(NodeKind::kTensorDict, PyDict_GET_SIZE(node->entries.ptr()));
    flat_.spec.add_key(reinterpret_cast<PyObject*>(tensordict_));
    flat_.spec.add_key(node->batch_size.ptr());
    flat_.spec.add_key(node->names.ptr());
    flat_.spec.add_key(looks_.target().ptr());
    flat_.spec.add_key(is_root && node->is_locked ? Py_True : Py_False);
    visit_items(node->entries.ptr(), depth, [&](PyObject* value) {
      const PyTypeObject* type = Py_TYPE(value);
      if (is_plain_tensor_class(type) || type == tensordict_) {
        visit_kept(value, depth + 1, Place::kInTensorDict);
      } else {
        visit_entry(py::reinterpret_borrow<py::object>(value), depth + 1, node->batch_size);
      }
    });
  }

  bool is_left(const TensorDictNode& root) const {
    return !packs_ && (root.is_consolidated || root.device == target_);
  }

  // Visits an entry that is neither a plain tensor nor of class TensorDict itself.
  void visit_entry(const py::object& value, int depth, py::handle batch_size) {
    const py::type type = py::type::of(value);
    if (type.is(entry_class_of_tensors_)) return visit(value.ptr(), depth);
    if (const std::optional<TensorClassNode> node = tensorclass_in(value.ptr())) {
      note_path(depth);
      return add_tensorclass(value.ptr(), *node, depth, Place::kInTensorDict);
    }
    const Seen seen = looks_.look_into(tensordict_, value.ptr(), batch_size);
    if (seen.kind == ValueKind::kCollection) {
      note_path(depth);
      return add_seen(value.ptr(), seen, depth);
    }
    entry_class_of_tensors_ = type;
    visit(value.ptr(), depth);
  }

  // Returns nullopt if this is no tensorclass that the walk takes apart itself.
  std::optional<TensorClassNode> tensorclass_in(PyObject* object) {
    const std::optional<bool> keeps_none = looks_.is_tensorclass(Py_TYPE(object));
    if (!keeps_none) return std::nullopt;
    std::optional<TensorClassNode> node = read_tensorclass(object, *keeps_none);
    if (!node || !is_tensordict(node->tensordict.ptr())) return std::nullopt;
    return read_tensordict(node->tensordict.ptr()) ? std::move(node) : std::nullopt;
  }

  // Its TensorDict has the same path.
  void add_tensorclass(PyObject* object, const TensorClassNode& node, int depth, Place place) {
    if (place == Place::kFree && is_left(*read_tensordict(node.tensordict.ptr()))) {
      return add_delegated(object, WhyDelegated::kClass);
    }
    flat_.spec.add(NodeKind::kTensorClass, 1);
    flat_.spec.add_key(reinterpret_cast<PyObject*>(Py_TYPE(object)));
    flat_.spec.add_key(node.others.ptr());
    path_.check_depth(depth, "data");
    static PyObject* const no_keys = PyTuple_New(0);
    path_[depth] = {PathStep::Kind::kNestedKey, no_keys, 0};
    note_path(depth + 1);
    visit_tensordict(node.tensordict.ptr(), depth + 1, place);
  }

  void note_path(int depth) {
    if (paths_ != nullptr) paths_->push_back("data" + path_.text(depth));
  }

  void add_tensor(PyObject* object) {
    keep_tensor(Py_NewRef(object), /*is_table=*/rows_ != nullptr && paths_ == nullptr);
  }

  // Takes over a reference.
  void keep_tensor(PyObject* object, bool is_table, bool is_mapped = false) {
    found_.add_tensor(object, flat_.spec.nodes(), is_table, is_mapped);
    flat_.spec.add(NodeKind::kLeaf, 0);
  }

  void visit_kept(PyObject* object, int depth, Place place = Place::kFree) {
    if (paths_ == nullptr && is_plain_tensor_class(Py_TYPE(object))) return add_tensor(object);
    const auto kept = py::reinterpret_borrow<py::object>(object);
    if (place == Place::kFree || !is_tensordict(object)) return visit(object, depth);
    note_path(depth);
    visit_tensordict(object, depth, place);
  }

  bool is_tensordict(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    if (tensordict_ == nullptr && looks_.is_tensordict(type)) tensordict_ = type;
    return type == tensordict_;
  }

  void visit_rare(PyObject* object, int depth) {
    if (const Parcel* const parcel = Parcel::in(object))
      return visit_parcel(object, *parcel, depth);
    add_seen(object, looks_.look(object, path_, depth, "data"), depth);
  }

  // Its leaves need no walk where the engine moves all of them.
  void visit_parcel(PyObject* object, const Parcel& parcel, int depth) {
    const bool is_moved = parcel.device() != target_ && found_.is_moved_from(parcel.device());
    if (delegates_all_ || parcel.needs_pickle() || packs_ || rows_ != nullptr || !is_moved) {
      const bool for_caller = !is_moved && !packs_ && rows_ == nullptr;  // who gets the views
      const py::object tree = parcel.tree(for_caller);
      if (paths_ != nullptr) paths_->pop_back();  // the root of the tree has it
      return visit_kept(tree.ptr(), depth);
    }
    const size_t first_node = flat_.spec.nodes();
    flat_.spec.append(parcel.layout().spec, parcel_device().ptr(), looks_.target().ptr());
    flat_.opaque += parcel.layout().opaque;
    found_.add_parcel(Py_NewRef(object), first_node);
  }

  void add_seen(PyObject* object, const Seen& seen, int depth) {
    switch (seen.kind) {
      case ValueKind::kOpaque:
        return add_opaque(object);
      case ValueKind::kDelegated:
        return rows_ != nullptr ? add_rows_of(object) : add_delegated(object, why_of_class());
      case ValueKind::kWrapped:
        return rows_ != nullptr ? add_rows_of(object) : add_wrapped(object, seen, depth);
      case ValueKind::kObject:  // not a table
        return rows_ != nullptr ? add_opaque(object) : add_delegated(object, WhyDelegated::kObject);
      case ValueKind::kArray:
        return rows_ != nullptr && paths_ == nullptr ? add_table_of(object) : add_array(object);
      case ValueKind::kMapped:
        return add_mapped(object);
      case ValueKind::kTensorDict:
        tensordict_ = Py_TYPE(object);
        return visit_tensordict(object, depth, Place::kFree);
      case ValueKind::kTensorClass:
        if (const std::optional<TensorClassNode> node = tensorclass_in(object)) {
          return add_tensorclass(object, *node, depth, Place::kFree);
        }
        return add_seen(object, looks_.look_at_collection(object), depth);
      case ValueKind::kContainer:
      case ValueKind::kCollection:
        flat_.spec.add(NodeKind::kCustom, PyList_GET_SIZE(seen.children.ptr()));
        flat_.spec.add_key(seen.unflatten.ptr());
        flat_.spec.add_key(seen.context.ptr());
        const bool of_tensors = seen.kind == ValueKind::kCollection;
        visit_children(seen.children.ptr(), seen.names.ptr(), seen.step, depth,
                       of_tensors ? Place::kInTensorDict : Place::kFree);
    }
  }

  // Adds a container of one leaf, which has the same path.
  void add_wrapped(PyObject* object, const Seen& seen, int depth) {
    flat_.spec.add(NodeKind::kCustom, 1);
    flat_.spec.add_key(seen.unflatten.ptr());
    flat_.spec.add_key(seen.context.ptr());
    if (paths_ == nullptr) return add_tensor(object);
    note_path(depth);
    add_delegated(object, why_of_class());
  }

  // `.to` returns a leaf on the target as it is; for other targets it is copied as a plain tensor.
  void add_mapped(PyObject* object) {
    const bool stays = target_.is_cpu() && rows_ == nullptr && !packs_;
    if (stays || paths_ != nullptr) return add_delegated(object, why_of_class());
    add_tensor(object);
  }

  // Reads the rows of a leaf for which only its own code can do so.
  void add_rows_of(PyObject* object) {
    py::object rows = rows_->read(object);
    if (!is_plain_tensor_class(Py_TYPE(rows.ptr()))) {
      return add_delegated(rows.ptr(), why_of_class());
    }
    keep_tensor(rows.release().ptr(), /*is_table=*/false);
  }

  void add_table_of(PyObject* array) {
    const bool mapped = is_mapped_array(array) && is_readable_array(array);
    keep_tensor(tensor_from_array(array).release().ptr(), /*is_table=*/true, mapped);
  }

  void add_array(PyObject* array) {
    if (delegates_all_) return add_delegated(array, WhyDelegated::kTorchMode);
    if (!found_.moves_from_host()) return add_delegated(array, WhyDelegated::kDevice);
    // For example another byte order: numpy makes a copy. Leaves of a parcel are in the order of
    // the tree, and the sorter sorts arrays before tensors.
    if (packs_ || !is_readable_array(array)) {
      return keep_tensor(tensor_from_array(array).release().ptr(), /*is_table=*/false);
    }
    found_.add_array(Py_NewRef(array), flat_.spec.nodes());
    flat_.spec.add(NodeKind::kLeaf, 0);
  }

  void add_delegated(PyObject* object, WhyDelegated why) {
    flat_.spec.add(NodeKind::kReady, 0);
    flat_.delegate(Py_NewRef(object), {0, flat_.spec.nodes() - 1, why});
  }

  WhyDelegated why_of_class() const {
    return altered_ ? WhyDelegated::kTorchMode : WhyDelegated::kClass;
  }

  void add_opaque(PyObject* object) {
    flat_.spec.add(NodeKind::kReady, 0);
    flat_.spec.set_ready(flat_.spec.nodes() - 1, Py_NewRef(object));
    ++flat_.opaque;
  }

  void check_unchanged(bool unchanged, int depth) const {
    if (unchanged) return;
    throw std::runtime_error("data" + path_.text(depth) +
                             " changed its size while it was being walked");
  }

  const c10::Device target_;
  RowLeaves* const rows_;
  const bool packs_;
  const bool altered_;
  const bool delegates_all_;
  std::vector<std::string>* const paths_;
  PyTypeObject* tensordict_ = nullptr;   // the class, once the walk has met it, if it knows it
  py::object entry_class_of_tensors_{};  // the class of the last tensor of a subclass
  FlatTree flat_;
  LeafSorter found_;
  ValueLooks looks_;
  Path path_;
};

FlatTree flatten(py::handle data, c10::Device target) {
  return Flattener(target, nullptr).run(data.ptr());
}

FlatTree flatten_for_parcel(py::handle data) {
  return Flattener(c10::Device(c10::kCPU), nullptr, nullptr, /*packs=*/true).run(data.ptr());
}

FlatTree flatten_tables(py::handle data, c10::Device target, RowLeaves& rows) {
  return Flattener(target, nullptr, &rows).run(data.ptr());
}

NamedTree flatten_with_paths(py::handle data, c10::Device target) {
  NamedTree found;
  found.tree = Flattener(target, &found.paths).run(data.ptr());
  return found;
}

std::optional<std::string> path_of(py::handle data, size_t node,
                                   std::optional<c10::Device> target) {
  try {
    std::vector<std::string> paths;
    const c10::Device host(c10::kCPU);
    Flattener(target.value_or(host), &paths, nullptr, !target.has_value()).run(data.ptr());
    if (node < paths.size()) return paths[node];
  } catch (const std::exception&) {  // the error about the leaf matters more
  }
  return std::nullopt;
}

bool is_dict_of_tensors(py::handle object) {
  if (!PyDict_CheckExact(object.ptr())) return false;
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  while (PyDict_Next(object.ptr(), &position, nullptr, &value) != 0) {
    if (!is_plain_tensor_class(Py_TYPE(value))) return false;
  }
  return true;
}

namespace {

py::list in_order(NamedTree found) {
  std::sort(found.tree.delegated.begin(), found.tree.delegated.end(),
            [](const Delegated& a, const Delegated& b) { return a.node < b.node; });
  py::list leaves;
  for (const Delegated& leaf : found.tree.delegated) {
    leaves.append(
        py::make_tuple(found.paths[leaf.node], py::handle(found.tree.spec.value(leaf.value))));
  }
  return leaves;
}

}  // namespace

py::list leaves_with_paths(py::handle data, c10::Device target) {
  return in_order(flatten_with_paths(data, target));
}

py::list tables_with_paths(py::handle storage, c10::Device target, RowLeaves& rows) {
  NamedTree found;
  found.tree = Flattener(target, &found.paths, &rows).run(storage.ptr());
  return in_order(std::move(found));
}

}  // namespace tdcopier
