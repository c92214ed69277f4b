// Writes the nodes and values of a tree one by one, in the order of the walk.
#include <torch/csrc/Size.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>

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
  LayoutWriter(const TreeSpec& spec, const LeafTable& leaves, ByteWriter& to)
      : spec_(spec), leaves_(leaves), key_(spec.keys().data()), to_(to) {}

  py::list write() {
    write_node();
    return std::move(pickled_);
  }

 private:
  void token(ParcelToken token) { to_.byte(static_cast<uint8_t>(token)); }

  void write_node() {
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
        token(ParcelToken::kCustom);
        to_.number(node.number);
        write_keys(2);
        return write_children(node.number, /*named=*/false);
      case NodeKind::kTensorDict:
        token(ParcelToken::kTensorDict);
        write_state_of_tensordict();
        to_.number(node.number);
        return write_children(node.number, /*named=*/true);
      case NodeKind::kTensorClass:
        token(ParcelToken::kTensorClass);
        write_keys(2);
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
    for (uint32_t i = 0; i < count; ++i) {
      if (named) write_keys(1);
      write_node();
    }
  }

  void write_keys(int count) {
    for (int i = 0; i < count; ++i) write_value(*key_++);
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

  void write_value(PyObject* value, int depth = 0) {
    if (value == Py_None) return token(ParcelToken::kNone);
    if (value == Py_True || value == Py_False) {
      return token(value == Py_True ? ParcelToken::kTrue : ParcelToken::kFalse);
    }
    if (PyUnicode_CheckExact(value)) return write_text(value);
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow != 0) return write_pickled(value);
      token(ParcelToken::kInteger);
      return to_.signed_number(number);
    }
    if (PyFloat_CheckExact(value)) {
      token(ParcelToken::kFloat);
      return to_.fixed64(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    }
    if (THPSize_Check(value)) return write_sizes(value);
    if (PyTuple_CheckExact(value) && depth < kMostDepth) {
      token(ParcelToken::kTupleOf);
      to_.number(static_cast<uint64_t>(PyTuple_GET_SIZE(value)));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
        write_value(PyTuple_GET_ITEM(value, i), depth + 1);
      }
      return;
    }
    write_pickled(value);
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
      if (utf8 == nullptr) {  // it has half a surrogate pair
        PyErr_Clear();
        return write_pickled(text);
      }
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
    to_.number(pickled_.size());
    pickled_.append(py::handle(value));
  }

  struct Recent {
    PyObject* text = nullptr;  // borrowed: the spec keeps it
    size_t index = 0;
  };
  static constexpr size_t kRecent = 64;
  static constexpr int kMostDepth = 100;  // of tuples; deeper ones are pickled

  const TreeSpec& spec_;
  const LeafTable& leaves_;
  size_t node_ = 0;
  PyObject* const* key_;
  ByteWriter& to_;
  py::list pickled_;
  py::dict texts_;  // to their indices
  std::array<Recent, kRecent> recent_{};
};

}  // namespace

bool can_be_packed(c10::ScalarType dtype) {
  return std::ranges::find(kParcelDtypes, dtype) != kParcelDtypes.end();
}

void write_layout(const TreeSpec& spec, const LeafTable& leaves, py::handle pickle,
                  ByteWriter& to) {
  ByteWriter tree;
  const py::list values = LayoutWriter(spec, leaves, tree).write();
  const std::string pickled = values.empty() ? "" : pickle(values).cast<std::string>();
  to.number(pickled.size());
  to.text(pickled);
  to.bytes(tree.written());
}

}  // namespace tdcopier
