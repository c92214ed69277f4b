// Writes the nodes and values of a tree one by one, in the order of the walk.
#include <torch/csrc/Size.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>

#include "python/runtime/hooks.h"
#include "python/walk/parcel_layout.h"
#include "python/walk/parcel_tokens.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Returns whether each stride is that of contiguous memory.
bool is_in_order(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (strides[d] != expected) return false;
    expected *= std::max<int64_t>(sizes[d], 1);
  }
  return true;
}

class LayoutWriter {
 public:
  LayoutWriter(const TreeSpec& spec, const LeafTable& leaves)
      : spec_(spec), leaves_(leaves), key_(spec.keys().data()), to_(written_.bytes) {}

  WrittenTree write() {
    write_node();
    return std::move(written_);
  }

 private:
  void token(ParcelToken token) { to_.byte(static_cast<uint8_t>(token)); }

  void write_node() {
    at_ = node_;
    const TreeSpec::Node& node = spec_.node(node_++);
    switch (node.kind) {
      case NodeKind::kList:
      case NodeKind::kTuple:
        token(node.kind == NodeKind::kList ? ParcelToken::kList : ParcelToken::kTuple);
        to_.number(node.number);
        return write_children(node.number, /*named=*/false);
      case NodeKind::kDict:
        token(ParcelToken::kDict);
        to_.number(node.number);
        return write_children(node.number, /*named=*/true);
      case NodeKind::kCustom:
        write_head_of_custom(node.number);
        return write_children(node.number, /*named=*/false);
      case NodeKind::kTensorDict:
        token(ParcelToken::kTensorDict);
        write_state_of_tensordict();
        to_.number(node.number);
        return write_children(node.number, /*named=*/true);
      case NodeKind::kTensorClass:
        token(ParcelToken::kTensorClass);
        write_value(*key_++);
        write_value(*key_++);
        return write_node();
      case NodeKind::kLeaf:
        return write_leaf(leaves_[node.number]);
      case NodeKind::kReady:
        token(ParcelToken::kValue);
        return write_value(spec_.value(node.number));
    }
    Py_UNREACHABLE();
  }

  void write_children(uint32_t count, bool named) {
    const size_t container = at_;
    for (uint32_t i = 0; i < count; ++i) {
      at_ = container;
      if (named) write_value(*key_++);
      write_node();
    }
  }

  // Some containers are written by the name of their class; others need a pickle.
  void write_head_of_custom(uint32_t children) {
    PyObject* const* const its = std::exchange(key_, key_ + 2);
    const py::object form = hooks().packed_form(py::handle(its[0]), py::handle(its[1]), children);
    const bool is_named = !form.is_none() && is_written_as_it_is(form[py::int_(2)].ptr(), 0);
    token(is_named ? ParcelToken::kRebuilt : ParcelToken::kCustom);
    to_.number(children);
    if (!is_named) return write_value(its[0]), write_value(its[1]);
    for (int i = 0; i < 3; ++i) {
      kept_.append(form[py::int_(i)]);  // known texts are told by their addresses
      write_value(kept_[kept_.size() - 1].ptr());
    }
  }

  // Its class is always the same, and its device is where the parcel is.
  void write_state_of_tensordict() {
    PyObject* const* const state = std::exchange(key_, key_ + 5);
    const bool has_names = state[2] != Py_None;
    const auto names = has_names
                           ? py::object(py::tuple(py::reinterpret_borrow<py::object>(state[2])))
                           : py::object(py::none());
    write_value(state[1]);
    write_value(names.ptr());
    write_value(state[4]);
  }

  void write_leaf(const Leaf& leaf) {
    const at::IntArrayRef sizes = leaves_.sizes(leaf);
    const at::IntArrayRef strides = leaves_.strides(leaf);
    const bool in_order = is_in_order(sizes, strides);
    token(in_order ? ParcelToken::kLeaf : ParcelToken::kPermuted);
    const auto* const code = std::ranges::find(kParcelDtypes, leaf.dtype);
    to_.byte(static_cast<uint8_t>(code - kParcelDtypes.begin()));
    to_.byte(static_cast<uint8_t>(leaf.dims));
    for (const int64_t size : sizes) to_.number(static_cast<uint64_t>(size));
    if (in_order) return;
    for (const int64_t stride : strides) to_.number(static_cast<uint64_t>(stride));
  }

  // Returns whether a value needs no pickle. Such a value cannot be changed.
  static bool is_written_as_it_is(PyObject* value, int depth) {
    if (value == Py_None || PyBool_Check(value) || PyFloat_CheckExact(value)) return true;
    if (PyUnicode_CheckExact(value)) {
      if (PyUnicode_AsUTF8(value) != nullptr) return true;
      PyErr_Clear();  // it has half a surrogate pair
      return false;
    }
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      PyLong_AsLongLongAndOverflow(value, &overflow);
      return overflow == 0;
    }
    if (PyBytes_CheckExact(value) || THPSize_Check(value)) return true;
    if (!PyTuple_CheckExact(value) || depth == kMostDepth) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      if (!is_written_as_it_is(PyTuple_GET_ITEM(value, i), depth + 1)) return false;
    }
    return true;
  }

  void write_value(PyObject* value) {
    if (!is_written_as_it_is(value, 0)) return write_pickled(value);
    write_plain_value(value);
  }

  void write_plain_value(PyObject* value) {
    if (value == Py_None) return token(ParcelToken::kNone);
    if (value == Py_True || value == Py_False) {
      return token(value == Py_True ? ParcelToken::kTrue : ParcelToken::kFalse);
    }
    if (PyUnicode_CheckExact(value)) return write_text(value);
    if (PyLong_CheckExact(value)) {
      token(ParcelToken::kInteger);
      return to_.signed_number(PyLong_AsLongLong(value));
    }
    if (PyFloat_CheckExact(value)) {
      token(ParcelToken::kFloat);
      return to_.fixed64(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    }
    if (THPSize_Check(value)) return write_sizes(value);
    if (PyBytes_CheckExact(value)) {
      token(ParcelToken::kBytes);
      to_.number(static_cast<uint64_t>(PyBytes_GET_SIZE(value)));
      return to_.text({PyBytes_AS_STRING(value), static_cast<size_t>(PyBytes_GET_SIZE(value))});
    }
    token(ParcelToken::kTupleOf);
    to_.number(static_cast<uint64_t>(PyTuple_GET_SIZE(value)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      write_plain_value(PyTuple_GET_ITEM(value, i));
    }
  }

  void write_sizes(PyObject* value) {
    token(ParcelToken::kSizes);
    to_.number(static_cast<uint64_t>(PyTuple_GET_SIZE(value)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(value, i));
      if (size == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
      to_.signed_number(size);
    }
  }

  // The keys of a batch are a few strings again and again, mostly the same objects.
  void write_text(PyObject* text) {
    Recent& recent = recent_[reinterpret_cast<uintptr_t>(text) / alignof(PyObject) % kRecent];
    if (recent.text != text) {
      Py_ssize_t bytes = 0;
      const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &bytes);
      const size_t known = texts_.size();
      const py::int_ next(known);
      PyObject* const index = PyDict_SetDefault(texts_.ptr(), text, next.ptr());
      if (index == nullptr) throw py::error_already_set();
      recent = {text, PyLong_AsUnsignedLong(index)};
      if (texts_.size() != known) {
        token(ParcelToken::kText);
        to_.number(static_cast<uint64_t>(bytes));
        return to_.text({utf8, static_cast<size_t>(bytes)});
      }
    }
    token(ParcelToken::kAgain);
    to_.number(recent.index);
  }

  void write_pickled(PyObject* value) {
    token(ParcelToken::kPickled);
    to_.number(written_.values.size());
    written_.values.append(py::handle(value));
    written_.nodes.push_back(at_);
  }

  struct Recent {
    PyObject* text = nullptr;  // borrowed: the spec keeps it
    size_t index = 0;
  };
  static constexpr size_t kRecent = 64;
  static constexpr int kMostDepth = 100;  // of tuples; deeper ones are pickled

  const TreeSpec& spec_;
  const LeafTable& leaves_;
  size_t node_ = 0;  // the next one
  size_t at_ = 0;    // the one whose values are written
  PyObject* const* key_;
  WrittenTree written_;
  ByteWriter& to_;
  py::dict texts_;  // to their indices
  py::list kept_;
  std::array<Recent, kRecent> recent_{};
};

}  // namespace

bool can_be_packed(c10::ScalarType dtype) {
  return std::ranges::find(kParcelDtypes, dtype) != kParcelDtypes.end();
}

WrittenTree write_tree(const TreeSpec& spec, const LeafTable& leaves) {
  return LayoutWriter(spec, leaves).write();
}

void write_layout(const WrittenTree& tree, std::string_view pickled, std::span<const Leaf> memory,
                  ByteWriter& to) {
  to.number(pickled.size());
  to.text(pickled);
  to.number(memory.size());
  for (const Leaf& leaf : memory) to.number(leaf.bytes);
  to.bytes(tree.bytes.written());
}

}  // namespace tdcopier
