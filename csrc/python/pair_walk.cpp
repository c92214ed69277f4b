// Goes down both trees side by side: containers by exact type first, then whatever is reached in
// the same way.
#include "python/pair_walk.h"

#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <utility>
#include <vector>

#include "base/internal_error.h"
#include "python/array_leaf.h"
#include "python/flatten.h"
#include "python/path.h"
#include "python/prefetch.h"
#include "python/value_kind.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

bool is_sequence(const PyTypeObject* type) {
  return type == &PyList_Type || type == &PyTuple_Type;
}

// What a value is to the walk, where it is not one of the commonest classes.
struct Seen {
  enum class Kind { kLeaf, kOpaque, kByIndex, kByKey, kByAttribute };
  Kind kind;
  py::object children;  // a list or a tuple
  py::object names;     // a list of keys or attribute names; None by index
};

// Foreign code may let go of either tree's children while it runs, so each pair in hand is kept.
class PairWalk {
 public:
  // `paths`, where given, gets the steps to every pair.
  explicit PairWalk(std::vector<std::string>* paths, PairNames names = {})
      : names_(names), paths_(paths) {
    load_numpy_types();
  }

  PairedTrees run(PyObject* source, PyObject* destination) {
    visit(source, destination, 0);
    return std::move(found_);
  }

 private:
  void visit(PyObject* source, PyObject* destination, int depth) {
    const PyTypeObject* from = Py_TYPE(source);
    const PyTypeObject* to = Py_TYPE(destination);
    if (THPVariable_CheckTypeExact(const_cast<PyTypeObject*>(from)) &&
        THPVariable_CheckTypeExact(const_cast<PyTypeObject*>(to))) {
      add(source, destination, depth);
    } else if (from == &PyDict_Type && to == &PyDict_Type) {
      visit_dicts(source, destination, depth);
    } else if (is_sequence(from) && is_sequence(to)) {
      visit_children(source, destination, {PathStep::Kind::kIndex, nullptr, 0}, nullptr, depth);
    } else if (KnownTypes::is_plain_opaque(from) && KnownTypes::is_plain_opaque(to)) {
      ++found_.opaque;
    } else {
      visit_rare(source, destination, depth);
    }
  }

  void add(PyObject* source, PyObject* destination, int depth) {
    if (paths_ != nullptr) paths_->push_back(steps_text(depth));
    Py_INCREF(source);
    Py_INCREF(destination);
    found_.leaves.push_back({source, destination});
  }

  // Two tensors need not be kept on the way: no code of theirs runs.
  void visit_kept(PyObject* source, PyObject* destination, int depth) {
    if (THPVariable_CheckTypeExact(Py_TYPE(source)) &&
        THPVariable_CheckTypeExact(Py_TYPE(destination))) {
      return add(source, destination, depth);
    }
    const auto from = py::reinterpret_borrow<py::object>(source);
    const auto to = py::reinterpret_borrow<py::object>(destination);
    visit(source, destination, depth);
  }

  // Both are lists or tuples. Code of some class further down may change them meanwhile.
  void visit_children(PyObject* source, PyObject* destination, PathStep step, PyObject* names,
                      int depth) {
    check_depth(depth);
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
      step.index = i;
      if (names != nullptr) step.name = PySequence_Fast_GET_ITEM(names, i);
      path_[depth] = step;
      visit_kept(PySequence_Fast_GET_ITEM(source, i), PySequence_Fast_GET_ITEM(destination, i),
                 depth + 1);
    }
    check_unchanged(
        count == PySequence_Fast_GET_SIZE(source) && count == PySequence_Fast_GET_SIZE(destination),
        depth);
  }

  void visit_dicts(PyObject* source, PyObject* destination, int depth) {
    check_depth(depth);
    const Py_ssize_t count = PyDict_GET_SIZE(source);
    Py_ssize_t position = 0;
    Py_ssize_t beside = 0;  // the place in the other dict, while both have the same order
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
      // A key's own comparison may run.
      const auto kept_key = py::reinterpret_borrow<py::object>(key);
      const auto kept_value = py::reinterpret_borrow<py::object>(value);
      if (!same_order) other = PyDict_GetItemWithError(destination, key);
      if (other == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        refuse_key(depth, names_.source, names_.destination, kept_key);
      }
      path_[depth] = {PathStep::Kind::kKey, key, 0};
      visit_kept(value, other, depth + 1);
    }
    check_unchanged(seen == count && PyDict_GET_SIZE(source) == count, depth);
    if (PyDict_GET_SIZE(destination) != count) {
      refuse_extra_key(py::reinterpret_borrow<py::object>(source),
                       py::reinterpret_borrow<py::object>(destination), depth);
    }
  }

  // The destination has more keys than the source, or they are others.
  [[noreturn]] void refuse_extra_key(const py::object& source, const py::object& destination,
                                     int depth) const {
    for (const py::handle key : py::list(destination)) {
      if (!py::bool_(source.attr("__contains__")(key))) {
        refuse_key(depth, names_.destination, names_.source, key);
      }
    }
    throw std::runtime_error(text(names_.destination, depth) +
                             " changed while it was being walked");
  }

  void visit_rare(PyObject* source, PyObject* destination, int depth) {
    const Seen from = look(source, names_.source, depth);
    const Seen to = look(destination, names_.destination, depth);
    if (from.kind != to.kind) {
      refuse(
          depth, " is a " + describe(source, from),
          " is a " + describe(destination, to) +
              ": both must be leaves, or containers that are reached in the same way (by key, by "
              "attribute or by index), or neither");
    }
    switch (from.kind) {
      case Seen::Kind::kLeaf:
        return add(source, destination, depth);
      case Seen::Kind::kOpaque:
        ++found_.opaque;
        return;
      case Seen::Kind::kByIndex:
        return visit_children(from.children.ptr(), to.children.ptr(),
                              {PathStep::Kind::kIndex, nullptr, 0}, nullptr, depth);
      case Seen::Kind::kByKey:
      case Seen::Kind::kByAttribute:
        return visit_named(from, to, depth);
    }
  }

  // Children by name, in whatever order.
  void visit_named(const Seen& from, const Seen& to, int depth) {
    const auto kind =
        from.kind == Seen::Kind::kByKey ? PathStep::Kind::kKey : PathStep::Kind::kAttribute;
    const py::list names = from.names;
    const py::list other_names = to.names;
    py::dict others;
    for (size_t i = 0; i < other_names.size(); ++i) {
      others[other_names[i]] = py::handle(PySequence_Fast_GET_ITEM(to.children.ptr(), i));
    }
    py::list in_order;
    py::dict known;
    for (const py::handle name : names) {
      if (!others.contains(name)) refuse_key(depth, names_.source, names_.destination, name);
      in_order.append(others[name]);
      known[name] = py::none();
    }
    for (const py::handle name : other_names) {
      if (!known.contains(name)) refuse_key(depth, names_.destination, names_.source, name);
    }
    visit_children(from.children.ptr(), in_order.ptr(), {kind, nullptr, 0}, names.ptr(), depth);
  }

  Seen look(PyObject* object, const char* tree, int depth) {
    using enum Seen::Kind;
    const auto value = py::reinterpret_borrow<py::object>(object);
    const PyTypeObject* type = Py_TYPE(object);
    if (THPVariable_CheckTypeExact(const_cast<PyTypeObject*>(type))) return {kLeaf, {}, {}};
    if (is_sequence(type)) return {kByIndex, value, py::none()};
    if (type == &PyDict_Type) {
      const auto dict = py::reinterpret_borrow<py::dict>(object);
      return {kByKey, py::list(dict.attr("values")()), py::list(dict)};
    }
    if (KnownTypes::is_plain_opaque(type)) return {kOpaque, {}, {}};
    const KnownType& known = types_.of(Py_TYPE(object));
    switch (known.kind) {
      case ValueKind::kOpaque:
        return {kOpaque, {}, {}};
      case ValueKind::kArray:
        return {look_at_array(object, tree, depth) ? kLeaf : kOpaque, {}, {}};
      case ValueKind::kDelegated:
      case ValueKind::kMapped:
        return {kLeaf, {}, {}};
      case ValueKind::kContainer:
      case ValueKind::kCollection:
        break;
    }
    return take_apart(known, value, tree, depth);
  }

  Seen take_apart(const KnownType& known, const py::object& value, const char* tree, int depth) {
    using enum Seen::Kind;
    const PathStep::Kind step = known.step;
    const py::object flatten = known.flatten;  // `known` may move while it runs
    py::object parts;
    try {
      // No target: the leaves of a collection are wanted wherever they are.
      parts =
          known.kind == ValueKind::kCollection ? flatten(value, py::none(), true) : flatten(value);
    } catch (py::error_already_set& error) {
      if (!error.matches(py::module_::import("tdcopier._containers").attr("Refused"))) throw;
      throw py::type_error(text(tree, depth) + " " + std::string(py::str(error.value())));
    }
    if (parts.is_none()) return {kLeaf, {}, {}};
    check_invariant(PyTuple_Check(parts.ptr()) && PyTuple_GET_SIZE(parts.ptr()) == 3,
                    "a container is taken apart into a list, a context and names");
    const py::tuple three = parts;
    if (three[2].is_none()) return {kByIndex, three[0], py::none()};
    check_invariant(py::len(three[0]) == py::len(three[2]),
                    "each child of a container has a name, or none has");
    return {step == PathStep::Kind::kAttribute ? kByAttribute : kByKey, three[0],
            py::list(three[2])};
  }

  // Whether it is a leaf.
  bool look_at_array(PyObject* object, const char* tree, int depth) const {
    const ArrayKind kind = classify_array(object);
    if (kind != ArrayKind::kUnknownNumber) return kind == ArrayKind::kConvertible;
    throw py::type_error(text(tree, depth) + " is a numpy array of dtype " +
                         array_dtype_name(object) +
                         ", which torch cannot take: convert it with .astype(...) first");
  }

  static std::string describe(PyObject* object, const Seen& seen) {
    const char* what = seen.kind == Seen::Kind::kLeaf      ? ", a leaf"
                       : seen.kind == Seen::Kind::kOpaque  ? ", which is opaque"
                       : seen.kind == Seen::Kind::kByKey   ? ", a container by key"
                       : seen.kind == Seen::Kind::kByIndex ? ", a container by index"
                                                           : ", a container by attribute";
    return std::string(Py_TYPE(object)->tp_name) + what;
  }

  void check_depth(int depth) const {
    if (depth < kMaxDepth) return;
    PyErr_Format(
        PyExc_RecursionError,
        "%s is nested more than %d containers deep, from %s... on: does it contain itself?",
        names_.source, kMaxDepth, text(names_.source, 8).c_str());
    throw py::error_already_set();
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

  std::string steps_text(int depth) const {
    std::string steps;
    for (int i = 0; i < depth; ++i) steps += path_[i].text();
    return steps;
  }
  std::string text(const char* tree, int depth) const { return tree + steps_text(depth); }

  const PairNames names_;
  std::vector<std::string>* const paths_;
  PairedTrees found_;
  KnownTypes types_;
  std::array<PathStep, kMaxDepth> path_;
};

}  // namespace

PairedTrees::~PairedTrees() {
  for (const LeafPair& pair : leaves) {
    Py_XDECREF(pair.source);
    Py_XDECREF(pair.destination);
  }
}

PairedTrees pair_trees(py::handle source, py::handle destination, PairNames names) {
  return PairWalk(nullptr, names).run(source.ptr(), destination.ptr());
}

std::optional<std::string> path_of_pair(py::handle source, py::handle destination, size_t pair) {
  std::vector<std::string> paths;
  try {
    PairWalk(&paths).run(source.ptr(), destination.ptr());
  } catch (py::error_already_set&) {  // what is wrong with the leaf matters more
  } catch (py::builtin_exception&) {
  }
  if (pair >= paths.size()) return std::nullopt;
  return paths[pair];
}

py::list pairs_with_paths(py::handle source, py::handle destination) {
  std::vector<std::string> paths;
  const PairedTrees trees = PairWalk(&paths).run(source.ptr(), destination.ptr());
  py::list pairs;
  for (size_t i = 0; i < paths.size(); ++i) {
    pairs.append(py::make_tuple(paths[i], py::handle(trees.leaves[i].source),
                                py::handle(trees.leaves[i].destination)));
  }
  return pairs;
}

}  // namespace tdcopier
