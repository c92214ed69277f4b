// Walks both trees side by side: tests for containers by exact type first, then matches others by
// how their children are reached.
#include "python/walk/pair_walk.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/runtime/cache_prefetch.h"
#include "python/runtime/hooks.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/parcel.h"
#include "python/walk/path.h"
#include "python/walk/tensordict_node.h"
#include "python/walk/value_kind.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

bool is_sequence(const PyTypeObject* type) {
  return type == &PyList_Type || type == &PyTuple_Type;
}

// Returns whether two values of the commonest opaque classes differ: by class, or by `==`, except
// that NaN equals NaN. Most are the same object.
bool plain_values_differ(PyObject* source, PyObject* destination) {
  if (source == destination) return false;
  if (Py_TYPE(source) != Py_TYPE(destination)) return true;
  if (PyFloat_CheckExact(source)) {
    const double from = PyFloat_AS_DOUBLE(source);
    const double to = PyFloat_AS_DOUBLE(destination);
    return from != to && !(std::isnan(from) && std::isnan(to));
  }
  const int equal = PyObject_RichCompareBool(source, destination, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 0;
}

// Describes one value of a pair whose two values are not both of the commonest classes. Owns its
// references.
struct Half {
  enum class Kind : uint8_t { kLeaf, kOpaque, kByIndex, kByKey, kByAttribute };
  Kind kind;
  PathStep::Kind step = PathStep::Kind::kIndex;
  py::object children{};   // by index: a list or a tuple; else a dict, by name
  bool is_object = false;  // a leaf that is no tensor, but has its own `.to`
};

// Foreign code may drop children of either tree while it runs, so the walk keeps a reference to
// each value that it is visiting.
class PairWalk {
 public:
  // `paths`, if given, receives the path of every pair.
  explicit PairWalk(std::vector<std::string>* paths, PairNames names = {}, bool list_opaque = false,
                    bool lists_objects = false)
      : names_(names),
        lists_objects_(lists_objects),
        paths_(paths),
        looks_({.target = {}, .named = true, .left = false}) {
    if (list_opaque) found_.opaque_pairs = py::list();
  }

  PairedTrees run(PyObject* source, PyObject* destination) {
    visit(source, destination, 0);
    return std::move(found_);
  }

 private:
  void visit(PyObject* source, PyObject* destination, int depth) {
    const PyTypeObject* from = Py_TYPE(source);
    const PyTypeObject* to = Py_TYPE(destination);
    if (is_plain_tensor_class(from) && is_plain_tensor_class(to)) {
      add(source, destination, depth);
    } else if (from == &PyDict_Type && to == &PyDict_Type) {
      enter(destination, depth);
      visit_dicts(source, destination, PathStep::Kind::kKey, depth);
    } else if (is_sequence(from) && is_sequence(to)) {
      enter(destination, depth);
      visit_sequences(source, destination, depth);
    } else if (ValueLooks::is_plain_opaque(from) && ValueLooks::is_plain_opaque(to)) {
      add_opaque(source, destination, plain_values_differ(source, destination), depth);
    } else {
      visit_rare(source, destination, depth);
    }
  }

  void add(PyObject* source, PyObject* destination, int depth) {
    if (paths_ != nullptr) paths_->push_back(path_.text(depth));
    found_.leaves.push_back({Py_NewRef(source), Py_NewRef(destination)});
  }

  // Lists the pair without its path, because the repr of a key may be expensive or raise.
  void add_opaque(PyObject* source, PyObject* destination, bool differ, int depth) {
    ++found_.opaque;
    found_.opaque_differences += static_cast<uint32_t>(differ);
    if (!found_.opaque_pairs) return;
    py::list holders;
    for (int i = depth - 1; i >= 0; --i) {
      const auto& [container, number] = holders_[i];
      const PathStep& step = path_[i];
      const py::object name =
          step.name != nullptr ? py::reinterpret_borrow<py::object>(step.name)
                               : py::reinterpret_steal<py::object>(PyLong_FromSsize_t(step.index));
      holders.append(py::make_tuple(number, py::handle(container), name, step.kind));
    }
    py::reinterpret_borrow<py::list>(found_.opaque_pairs)
        .append(py::make_tuple(py::handle(source), py::handle(destination), differ, holders));
  }

  // Notes that the walk visits the children of a container of the destination.
  void enter(PyObject* container, int depth) {
    if (!found_.opaque_pairs) return;
    holders_.resize(depth);
    holders_.push_back({container, entered_++});
  }

  // Asks tdcopier._opaque whether two opaque values of any classes differ.
  bool differ(PyObject* source, PyObject* destination) {
    if (source == destination) return false;
    return hooks().differ(py::handle(source), py::handle(destination)).cast<bool>();
  }

  // Visits a pair and keeps references to it meanwhile, except for two tensors, which run no code.
  void visit_kept(PyObject* source, PyObject* destination, int depth) {
    if (is_plain_tensor_class(Py_TYPE(source)) && is_plain_tensor_class(Py_TYPE(destination))) {
      return add(source, destination, depth);
    }
    const auto from = py::reinterpret_borrow<py::object>(source);
    const auto to = py::reinterpret_borrow<py::object>(destination);
    visit(source, destination, depth);
  }

  // The code of a class further down may change the sequences during the walk.
  void visit_sequences(PyObject* source, PyObject* destination, int depth) {
    path_.check_depth(depth, names_.source);
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(source);
    if (count != PySequence_Fast_GET_SIZE(destination)) {
      refuse(depth, " has " + std::to_string(count) + " children",
             " has " + std::to_string(PySequence_Fast_GET_SIZE(destination)) +
                 ": both must have the same number");
    }
    prefetch_each(PySequence_Fast_ITEMS(source), count);
    prefetch_each(PySequence_Fast_ITEMS(destination), count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      check_unchanged(
          i < PySequence_Fast_GET_SIZE(source) && i < PySequence_Fast_GET_SIZE(destination), depth);
      path_[depth] = {PathStep::Kind::kIndex, nullptr, i};
      visit_kept(PySequence_Fast_GET_ITEM(source, i), PySequence_Fast_GET_ITEM(destination, i),
                 depth + 1);
    }
    check_unchanged(
        count == PySequence_Fast_GET_SIZE(source) && count == PySequence_Fast_GET_SIZE(destination),
        depth);
  }

  // `step`: the kind of step that the keys stand for in a path.
  void visit_dicts(PyObject* source, PyObject* destination, PathStep::Kind step, int depth) {
    path_.check_depth(depth, names_.source);
    const Py_ssize_t count = PyDict_GET_SIZE(source);
    Py_ssize_t position = 0;
    Py_ssize_t beside = 0;  // position in the other dict, while both have the same order
    bool same_order = true;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t seen = 0;
    while (PyDict_Next(source, &position, &key, &value) != 0) {
      check_unchanged(++seen <= count, depth);
      PyObject* other_key = nullptr;
      PyObject* other = nullptr;
      same_order = same_order && PyDict_Next(destination, &beside, &other_key, &other) != 0 &&
                   other_key == key;
      // The look-up below may run a key's own comparison.
      const auto kept_key = py::reinterpret_borrow<py::object>(key);
      const auto kept_value = py::reinterpret_borrow<py::object>(value);
      if (!same_order) other = PyDict_GetItemWithError(destination, key);
      if (other == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        refuse_key(depth, names_.source, names_.destination, kept_key);
      }
      path_[depth] = {step, key, 0};
      visit_kept(value, other, depth + 1);
    }
    check_unchanged(seen == count && PyDict_GET_SIZE(source) == count, depth);
    if (PyDict_GET_SIZE(destination) != count) {
      refuse_extra_key(py::reinterpret_borrow<py::dict>(source),
                       py::reinterpret_borrow<py::dict>(destination), depth);
    }
  }

  // Throws for a key of the destination that the source lacks.
  void refuse_extra_key(const py::dict& source, const py::dict& destination, int depth) const {
    for (const py::handle key : py::list(destination)) {
      if (!source.contains(key)) refuse_key(depth, names_.destination, names_.source, key);
    }
    check_unchanged(false, depth);
  }

  void visit_rare(PyObject* source, PyObject* destination, int depth) {
    if (Parcel::in(source) != nullptr || Parcel::in(destination) != nullptr) {
      return visit_parcels(source, destination, depth);
    }
    const bool from_tensordict = looks_.is_of_tensordict(Py_TYPE(source));
    if (from_tensordict != looks_.is_of_tensordict(Py_TYPE(destination))) {
      return visit_level(source, destination, depth);
    }
    if (from_tensordict && visit_tensordicts(source, destination, depth)) return;
    const Half from = look(source, names_.source, depth);
    const Half to = look(destination, names_.destination, depth);
    if (from_tensordict && !have_same_keys(from.children, to.children)) {
      return visit_level(source, destination, depth);  // which may name the place where they differ
    }
    visit_halves(source, from, destination, to, depth);
  }

  // A parcel stands for its tree, whose leaves are views of it.
  void visit_parcels(PyObject* source, PyObject* destination, int depth) {
    const Parcel* const from = Parcel::in(source);
    const Parcel* const to = Parcel::in(destination);
    if (to != nullptr && (to->traits().is_read_only || !to->device().is_cpu())) {
      throw py::type_error(names_.destination + path_.text(depth) +
                           " is a parcel, and not in writable memory of the host");
    }
    if (to != nullptr && found_.opaque_pairs) {
      throw py::type_error(names_.destination + path_.text(depth) +
                           " is a parcel, whose other values cannot be replaced: copy_opaque=True");
    }
    const py::object from_tree = from != nullptr ? from->tree(/*for_caller=*/false)
                                                 : py::reinterpret_borrow<py::object>(source);
    const py::object to_tree = to != nullptr ? to->tree(/*for_caller=*/false)
                                             : py::reinterpret_borrow<py::object>(destination);
    visit(from_tree.ptr(), to_tree.ptr(), depth);
  }

  // Visits two TensorDicts without Python code if they contain only tensors. Else returns false.
  bool visit_tensordicts(PyObject* source, PyObject* destination, int depth) {
    if (!in_tensors_ &&
        !(contains_only_tensors(source, depth) && contains_only_tensors(destination, depth))) {
      return false;
    }
    const std::optional<TensorDictNode> from = read_node(source);
    const std::optional<TensorDictNode> to = read_node(destination);
    if (!from || !to) return false;
    const bool is_nested = std::exchange(in_tensors_, true);
    enter(destination, depth);
    visit_dicts(from->entries.ptr(), to->entries.ptr(), PathStep::Kind::kKey, depth);
    in_tensors_ = is_nested;
    return true;
  }

  // Returns whether it is a TensorDict of plain tensors and of such TensorDicts, none of them
  // empty: look() does not see an empty one within another.
  bool contains_only_tensors(PyObject* object, int depth) {
    const std::optional<TensorDictNode> node = read_node(object);
    if (!node || depth >= kMaxDepth || PyDict_GET_SIZE(node->entries.ptr()) == 0) return false;
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(node->entries.ptr(), &position, nullptr, &value) != 0) {
      const bool is_tensor = is_plain_tensor_class(Py_TYPE(value));
      if (!is_tensor && !contains_only_tensors(value, depth + 1)) return false;
    }
    return true;
  }

  // Returns nullopt if this is not a TensorDict that the walk can read itself.
  std::optional<TensorDictNode> read_node(PyObject* object) {
    if (!looks_.is_readable_tensordict(Py_TYPE(object))) return std::nullopt;
    return read_tensordict(object);
  }

  static bool have_same_keys(const py::dict& some, const py::dict& others) {
    if (some.size() != others.size()) return false;
    return std::ranges::all_of(some, [&](const auto& item) { return others.contains(item.first); });
  }

  // Visits a pair with at least one of tensordict's collections. look() names all leaves in one by
  // nested keys, which dicts do not have: here the nested ones are children. Non-tensor data stand
  // for the value that they consist of.
  void visit_level(PyObject* source, PyObject* destination, int depth) {
    py::object from_value;
    py::object to_value;
    const Half from = look_at_level(source, names_.source, depth, from_value);
    const Half to = look_at_level(destination, names_.destination, depth, to_value);
    if (!from_value && !to_value) return visit_halves(source, from, destination, to, depth);
    visit(from_value ? from_value.ptr() : source, to_value ? to_value.ptr() : destination, depth);
  }

  // Sets `value` for non-tensor data.
  Half look_at_level(PyObject* object, const char* tree, int depth, py::object& value) {
    using enum Half::Kind;
    if (!looks_.is_of_tensordict(Py_TYPE(object))) return look(object, tree, depth);
    const Seen seen = looks_.look_at_level(object, path_, depth, tree);
    if (seen.kind == ValueKind::kOpaque) {
      value = seen.context;
      return {kOpaque};
    }
    return {PyList_Check(seen.children.ptr()) ? kByIndex : kByKey, seen.step, seen.children};
  }

  void visit_halves(PyObject* source, const Half& from, PyObject* destination, const Half& to,
                    int depth) {
    // Both trees refer to it: nothing to fill.
    if (from.is_object && source == destination && !lists_objects_) {
      return add_opaque(source, destination, /*differ=*/false, depth);
    }
    if (from.kind != to.kind) {
      refuse(
          depth, " is " + describe(source, from),
          " is " + describe(destination, to) +
              ": both must be leaves, or containers that are reached in the same way (by key, by "
              "attribute or by index), or neither" +
              (is_stack(source, from) || is_stack(destination, to)
                   ? ". A lazy stack has its members by index: give a list or a lazy stack in the "
                     "other tree, or one TensorDict in both, made with to_tensordict()"
                   : ""));
    }
    switch (from.kind) {
      case Half::Kind::kLeaf:
        return add(source, destination, depth);
      case Half::Kind::kOpaque:
        if (depth == 0) refuse_unknown_root(source, destination);
        return add_opaque(source, destination, differ(source, destination), depth);
      case Half::Kind::kByIndex:
        enter(destination, depth);
        return visit_sequences(from.children.ptr(), to.children.ptr(), depth);
      case Half::Kind::kByKey:
      case Half::Kind::kByAttribute:
        enter(destination, depth);
        return visit_dicts(from.children.ptr(), to.children.ptr(), from.step, depth);
    }
  }

  // Throws TypeError if the class of a whole tree is unknown, so that nothing would be copied.
  void refuse_unknown_root(PyObject* source, PyObject* destination) const {
    const py::object& refuse = hooks().refuse_root;
    refuse(names_.source, py::handle(source));
    refuse(names_.destination, py::handle(destination));
  }

  Half look(PyObject* object, const char* tree, int depth) {
    using enum Half::Kind;
    const auto value = py::reinterpret_borrow<py::object>(object);
    const PyTypeObject* type = Py_TYPE(object);
    if (is_plain_tensor_class(type)) return {kLeaf};
    if (is_sequence(type)) return {kByIndex, PathStep::Kind::kIndex, value};
    if (type == &PyDict_Type) return {kByKey, PathStep::Kind::kKey, value};
    if (ValueLooks::is_plain_opaque(type)) return {kOpaque};
    const Seen seen = looks_.look(object, path_, depth, tree);
    if (seen.kind == ValueKind::kOpaque) return {kOpaque};
    if (seen.kind == ValueKind::kObject) return {.kind = kLeaf, .is_object = true};
    if (seen.kind != ValueKind::kContainer && seen.kind != ValueKind::kCollection) return {kLeaf};
    if (!seen.names) return {kByIndex, seen.step, seen.children};
    py::dict by_name;
    const auto count = static_cast<Py_ssize_t>(py::len(seen.names));
    for (Py_ssize_t i = 0; i < count; ++i) {
      by_name[py::handle(PySequence_Fast_GET_ITEM(seen.names.ptr(), i))] =
          py::handle(PyList_GET_ITEM(seen.children.ptr(), i));
    }
    check_unchanged(PyDict_GET_SIZE(by_name.ptr()) == count, depth);
    return {seen.step == PathStep::Kind::kAttribute ? kByAttribute : kByKey, seen.step, by_name};
  }

  bool is_stack(PyObject* object, const Half& half) {
    return half.kind == Half::Kind::kByIndex && looks_.is_of_tensordict(Py_TYPE(object));
  }

  static std::string describe(PyObject* object, const Half& half) {
    constexpr const char* kWhat[] = {", a leaf", ", which is opaque", ", a container by index",
                                     ", a container by key", ", a container by attribute"};
    const std::string name = Py_TYPE(object)->tp_name;
    const bool begins_with_vowel = std::string_view("aeiouAEIO").find(name[0]) != std::string::npos;
    return (begins_with_vowel ? "an " : "a ") + name + kWhat[static_cast<size_t>(half.kind)];
  }

  void check_unchanged(bool unchanged, int depth) const {
    if (unchanged) return;
    throw std::runtime_error(text(names_.source, depth) + " or " + text(names_.destination, depth) +
                             " changed its size while it was being walked");
  }

  [[noreturn]] void refuse(int depth, const std::string& source,
                           const std::string& destination) const {
    throw py::value_error(text(names_.source, depth) + source + ", but " +
                          text(names_.destination, depth) + destination);
  }

  [[noreturn]] void refuse_key(int depth, const char* has, const char* lacks,
                               py::handle key) const {
    throw py::value_error(text(has, depth) + " has " + std::string(py::repr(key)) + ", which " +
                          text(lacks, depth) + " lacks: both must have the same");
  }

  std::string text(const char* tree, int depth) const { return tree + path_.text(depth); }

  const PairNames names_;
  const bool lists_objects_;  // as leaves, where both trees are one
  std::vector<std::string>* const paths_;
  PairedTrees found_;
  ValueLooks looks_;
  Path path_;
  bool in_tensors_ = false;  // within two TensorDicts that contain only tensors
  // By depth, only if opaque pairs are listed: the container of the destination that the walk is
  // in, which the visit keeps alive, and its number.
  std::vector<std::pair<PyObject*, uint64_t>> holders_;
  uint64_t entered_ = 0;
};

}  // namespace

PairedTrees::~PairedTrees() {
  for (const LeafPair& pair : leaves) {
    Py_XDECREF(pair.source);
    Py_XDECREF(pair.destination);
  }
}

PairedTrees pair_trees(py::handle source, py::handle destination, PairNames names,
                       bool list_opaque) {
  return PairWalk(nullptr, names, list_opaque).run(source.ptr(), destination.ptr());
}

std::optional<std::string> path_of_pair(py::handle source, py::handle destination, size_t pair) {
  std::vector<std::string> paths;
  try {
    PairWalk(&paths).run(source.ptr(), destination.ptr());
  } catch (const std::exception&) {  // the error about the leaf matters more
  }
  if (pair >= paths.size()) return std::nullopt;
  return paths[pair];
}

py::list pairs_with_paths(py::handle source, py::handle destination, PairNames names,
                          bool lists_objects) {
  std::vector<std::string> paths;
  const PairedTrees trees = PairWalk(&paths, names, /*list_opaque=*/false, lists_objects)
                                .run(source.ptr(), destination.ptr());
  py::list pairs;
  for (size_t i = 0; i < paths.size(); ++i) {
    pairs.append(py::make_tuple(paths[i], py::handle(trees.leaves[i].source),
                                py::handle(trees.leaves[i].destination)));
  }
  return pairs;
}

}  // namespace tdcopier
