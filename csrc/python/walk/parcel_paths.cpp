// Finds where a value that was pickled is in the tree of a layout, for messages.
#include <string>
#include <utility>

#include "python/walk/parcel_layout.h"
#include "python/walk/path.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Walks a tree as LayoutReader has read it, up to one place.
class PathFinder {
 public:
  PathFinder(const TreeSpec& spec, const PickledPlace& place)
      : spec_(spec),
        wanted_key_(place.is_key ? place.place : spec.keys().size()),
        wanted_value_(place.is_key ? spec.values().size() : place.place) {}

  std::string find() {
    visit("data");
    return std::move(found_);
  }

 private:
  // Returns whether the place is in this node; `path` is the node's.
  bool visit(const std::string& path) {
    const TreeSpec::Node& node = spec_.node(node_++);
    switch (node.kind) {
      case NodeKind::kLeaf:
        return false;
      case NodeKind::kReady:
        return node.number == wanted_value_ && end_at(path);
      case NodeKind::kTensorClass:
        return take_keys(2, path) || visit(path);
      case NodeKind::kCustom: {
        const size_t context = key_ + 1;
        return take_keys(2, path) || visit_children(node.number, path, context);
      }
      case NodeKind::kTensorDict:
        return take_keys(5, path) || visit_items(node.number, path);
      case NodeKind::kDict:
        return visit_items(node.number, path);
      case NodeKind::kList:
      case NodeKind::kTuple:
        return visit_children(node.number, path, spec_.keys().size());
    }
    Py_UNREACHABLE();
  }

  bool visit_items(uint32_t count, const std::string& path) {
    for (uint32_t i = 0; i < count; ++i) {
      PyObject* const key = spec_.keys()[key_];
      if (take_keys(1, path)) return true;
      if (visit(path + PathStep{PathStep::Kind::kKey, key, 0}.text())) return true;
    }
    return false;
  }

  bool visit_children(uint32_t count, const std::string& path, size_t context) {
    for (uint32_t i = 0; i < count; ++i) {
      const py::object name = name_of(i, context);
      const auto kind = name.is_none() ? PathStep::Kind::kIndex : PathStep::Kind::kAttribute;
      if (visit(path + PathStep{kind, name.ptr(), static_cast<Py_ssize_t>(i)}.text())) return true;
    }
    return false;
  }

  // Returns the attribute of a dataclass that a child is read from, by the context of its rule
  // (see packed_form); else None. No code of the class runs.
  py::object name_of(uint32_t child, size_t context) const {
    if (context >= spec_.keys().size()) return py::none();
    PyObject* const its = spec_.keys()[context];
    if (!PyTuple_CheckExact(its) || PyTuple_GET_SIZE(its) != 4) return py::none();
    PyObject* const places = PyTuple_GET_ITEM(its, 1);
    if (!PyList_CheckExact(places) || PyList_GET_SIZE(places) <= child) return py::none();
    const py::object names = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(places, child));
    if (!PyList_CheckExact(names.ptr()) || PyList_GET_SIZE(names.ptr()) == 0) return py::none();
    return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(names.ptr(), 0));
  }

  bool take_keys(size_t count, const std::string& path) {
    const size_t begin = std::exchange(key_, key_ + count);
    return begin <= wanted_key_ && wanted_key_ < key_ && end_at(path);
  }

  bool end_at(const std::string& path) {
    found_ = path;
    return true;
  }

  const TreeSpec& spec_;
  const size_t wanted_key_;    // or past the end
  const size_t wanted_value_;  // or past the end
  size_t node_ = 0;            // the next one
  size_t key_ = 0;             // the next one
  std::string found_ = "data";
};

}  // namespace

std::string ParcelLayout::path_of_pickled() const {
  return places.empty() ? "data" : PathFinder(spec, places.front()).find();
}

}  // namespace tdcopier
