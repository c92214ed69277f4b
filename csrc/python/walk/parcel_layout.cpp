// Reads layouts, and keeps those of the last parcels. Each byte may be anything: a number is
// checked before it is used, and a node before what it has.
#include "python/walk/parcel_layout.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Size.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "python/walk/parcel_tokens.h"
#include "python/walk/path.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

constexpr uint64_t kMostDims = 64;  // torch's own limit
constexpr uint64_t kMostStride = std::numeric_limits<int64_t>::max();
constexpr size_t kLeastEntryBytes = 2;  // of a dict: a key and a child

py::object tensordict_class() {
  return py::module_::import("tensordict").attr("TensorDict");
}

class LayoutReader {
 public:
  LayoutReader(ByteReader& from, py::list pickled, uint64_t most_bytes)
      : from_(from), pickled_(std::move(pickled)), bytes_left_(most_bytes) {}

  void read(ParcelLayout& layout) {
    layout_ = &layout;
    read_node(0);
    if (from_.left() != 0) throw MalformedBytes("bytes follow the tree");
  }

 private:
  ParcelToken token() {
    const uint8_t found = from_.byte();
    if (found > static_cast<uint8_t>(ParcelToken::kLast)) throw MalformedBytes("an unknown token");
    return static_cast<ParcelToken>(found);
  }

  void read_node(int depth) {
    if (depth > kMaxDepth) throw MalformedBytes("the tree is nested too deep");
    TreeSpec& spec = layout_->spec;
    const ParcelToken found = token();
    switch (found) {
      case ParcelToken::kList:
      case ParcelToken::kTuple: {
        const size_t count = from_.count(1);
        spec.add(found == ParcelToken::kList ? NodeKind::kList : NodeKind::kTuple, count);
        for (size_t i = 0; i < count; ++i) read_node(depth + 1);
        return;
      }
      case ParcelToken::kDict:
        return read_items(NodeKind::kDict, depth);
      case ParcelToken::kCustom: {
        const size_t count = from_.count(1);
        spec.add(NodeKind::kCustom, count);
        add_key(read_pickled([](PyObject* it) { return PyCallable_Check(it); }));
        add_key(read_value(depth));
        for (size_t i = 0; i < count; ++i) read_node(depth + 1);
        return;
      }
      case ParcelToken::kTensorDict:
        read_state_of_tensordict();
        return read_items(NodeKind::kTensorDict, depth);
      case ParcelToken::kTensorClass:
        spec.add(NodeKind::kTensorClass, 1);
        add_key(read_pickled([](PyObject* it) { return PyType_Check(it); }));
        add_key(read_pickled([](PyObject* it) { return PyDict_Check(it); }));
        return read_node(depth + 1);
      case ParcelToken::kLeaf:
      case ParcelToken::kPermuted:
        return read_leaf(found == ParcelToken::kPermuted);
      case ParcelToken::kValue: {
        spec.add(NodeKind::kReady, 0);
        const size_t node = spec.nodes() - 1;
        spec.set_ready(node, read_value(depth).release().ptr());
        ++layout_->opaque;
        return;
      }
      default:
        throw MalformedBytes("a value where a node is expected");
    }
  }

  void read_items(NodeKind kind, int depth) {
    const size_t count = from_.count(kLeastEntryBytes);
    layout_->spec.add(kind, count);
    for (size_t i = 0; i < count; ++i) {
      const py::object key = read_value(depth);
      if (PyObject_Hash(key.ptr()) == -1) {
        PyErr_Clear();
        throw MalformedBytes("the key of a dict has no hash");
      }
      layout_->spec.add_key(key.ptr());
      read_node(depth + 1);
    }
  }

  void add_key(const py::object& key) { layout_->spec.add_key(key.ptr()); }

  // Reads a value that a node needs to be of some type, and that only pickle can write.
  template <typename IsIt>
  py::object read_pickled(IsIt is_it) {
    if (token() != ParcelToken::kPickled) throw MalformedBytes("a node needs a pickled value");
    py::object found = pickled_[index_below(pickled_.size())];
    if (!is_it(found.ptr())) throw MalformedBytes("a pickled value is of the wrong type");
    return found;
  }

  void read_state_of_tensordict() {
    add_key(tensordict_class());
    const py::object batch_size = read_value(0);
    if (!THPSize_Check(batch_size.ptr())) throw MalformedBytes("a batch size is no torch.Size");
    const py::object names = read_value(0);
    const bool are_names = names.is_none() || PyTuple_CheckExact(names.ptr());
    if (!are_names) throw MalformedBytes("names of dimensions are no tuple");
    add_key(batch_size);
    add_key(names);
    layout_->spec.add_key(parcel_device().ptr());
    add_key(py::bool_(read_value(0).is(py::bool_(true))));
  }

  void read_leaf(bool permuted) {
    const uint8_t code = from_.byte();
    if (code >= kParcelDtypes.size()) throw MalformedBytes("an unknown dtype");
    const c10::ScalarType dtype = kParcelDtypes[code];
    const uint8_t dims = from_.byte();
    if (dims > kMostDims) throw MalformedBytes("a leaf has too many dimensions");
    std::array<int64_t, 2 * kMostDims> shape;
    const std::span<int64_t> sizes(shape.data(), dims);
    const std::span<int64_t> strides(shape.data() + kMostDims, dims);
    const auto most = static_cast<int64_t>(kMaxLeafBytes / c10::elementSize(dtype));
    int64_t elements = 1;
    bool is_empty = false;
    for (int64_t& size : sizes) {
      const uint64_t found = from_.number();
      if (found > static_cast<uint64_t>(most)) throw MalformedBytes("a leaf is too large");
      size = static_cast<int64_t>(found);
      is_empty |= size == 0;
      if (__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements) ||
          elements > most) {
        throw MalformedBytes("a leaf is too large");
      }
    }
    if (permuted) {
      read_strides(sizes, strides, is_empty ? 0 : elements);
    } else {
      int64_t next = 1;
      for (size_t d = dims; d-- > 0;) {
        strides[d] = next;
        next *= std::max<int64_t>(sizes[d], 1);
      }
    }
    const uint64_t bytes = is_empty ? 0 : static_cast<uint64_t>(elements) * c10::elementSize(dtype);
    if (bytes > bytes_left_) throw MalformedBytes("the leaves need more bytes than there are");
    bytes_left_ -= bytes;
    layout_->spec.add(NodeKind::kLeaf, layout_->leaves.size());
    layout_->leaves.add(nullptr, dtype, sizes, strides);
  }

  // A leaf reaches no further than its elements do in a row, so that none reads its neighbours.
  void read_strides(std::span<const int64_t> sizes, std::span<int64_t> strides, int64_t elements) {
    int64_t last = 0;  // of the element that is furthest from the first
    for (size_t d = 0; d < sizes.size(); ++d) {
      const uint64_t stride = from_.number();
      if (stride > kMostStride) throw MalformedBytes("a stride is too large");
      strides[d] = static_cast<int64_t>(stride);
      if (elements == 0) continue;  // any stride will do
      int64_t further = 0;
      if (__builtin_mul_overflow(sizes[d] - 1, strides[d], &further) ||
          __builtin_add_overflow(last, further, &last)) {
        throw MalformedBytes("a stride is too large");
      }
    }
    if (elements != 0 && last >= elements) throw MalformedBytes("a leaf reaches beyond its bytes");
  }

  py::object read_value(int depth) {
    if (depth > kMaxDepth) throw MalformedBytes("a value is nested too deep");
    switch (token()) {
      case ParcelToken::kNone:
        return py::none();
      case ParcelToken::kFalse:
        return py::bool_(false);
      case ParcelToken::kTrue:
        return py::bool_(true);
      case ParcelToken::kInteger:
        return py::int_(from_.signed_number());
      case ParcelToken::kFloat:
        return py::float_(std::bit_cast<double>(from_.fixed64()));
      case ParcelToken::kText:
        return read_text();
      case ParcelToken::kAgain:
        return texts_[index_below(texts_.size())];
      case ParcelToken::kTupleOf: {
        const size_t count = from_.count(1);
        py::list items;  // a tuple that says how long it is may not be
        for (size_t i = 0; i < count; ++i) items.append(read_value(depth + 1));
        return py::tuple(items);
      }
      case ParcelToken::kSizes:
        return read_sizes();
      case ParcelToken::kPickled:
        return pickled_[index_below(pickled_.size())];
      default:
        throw MalformedBytes("a node where a value is expected");
    }
  }

  py::object read_text() {
    const std::string_view text = from_.text(from_.number());
    PyObject* const made =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
    if (made == nullptr) {
      PyErr_Clear();
      throw MalformedBytes("a text is not UTF-8");
    }
    texts_.push_back(py::reinterpret_steal<py::object>(made));
    return texts_.back();
  }

  py::object read_sizes() {
    const size_t count = from_.count(1);
    py::tuple sizes(count);
    for (size_t i = 0; i < count; ++i) sizes[i] = py::int_(from_.signed_number());
    auto* const type = reinterpret_cast<PyObject*>(&THPSizeType);
    PyObject* const made = PyObject_CallFunctionObjArgs(type, sizes.ptr(), nullptr);
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }

  size_t index_below(size_t count) {
    const uint64_t index = from_.number();
    if (index >= count) throw MalformedBytes("an index is out of range");
    return static_cast<size_t>(index);
  }

  ByteReader& from_;
  const py::list pickled_;
  uint64_t bytes_left_;  // for further leaves
  std::vector<py::object> texts_;
  ParcelLayout* layout_ = nullptr;
};

constexpr size_t kMostLayoutBytes = size_t{1} << 31;  // so that 32 bits are enough to number nodes

std::shared_ptr<const ParcelLayout> read_new_layout(std::span<const std::byte> bytes,
                                                    py::handle unpickle, uint64_t most_bytes) {
  if (bytes.size() > kMostLayoutBytes) throw MalformedBytes("the layout is too long");
  ByteReader from(bytes);
  const std::string_view pickled = from.text(from.number());
  auto layout = std::make_shared<ParcelLayout>(
      ParcelLayout{{}, LeafTable(c10::Device(c10::kCPU)), nullptr, py::none()});
  py::list values;
  if (!pickled.empty()) {
    if (unpickle.is_none()) {
      throw MalformedBytes("the layout has a pickle, which runs code when it is read");
    }
    layout->pickled = py::bytes(pickled.data(), pickled.size());
    values = unpickle(layout->pickled).cast<py::list>();
  }
  LayoutReader(from, std::move(values), most_bytes).read(*layout);
  layout->plan = parcel_plan(layout->leaves);
  return layout;
}

// The layouts of the last parcels: those of batches of fixed shapes are equal.
class KnownLayouts {
 public:
  // Never freed: its layouts have Python objects.
  static KnownLayouts& get() {
    static auto* const known = new KnownLayouts();
    return *known;
  }

  std::shared_ptr<const ParcelLayout> find(std::span<const std::byte> bytes) const {
    const Known& known = place(bytes);
    return std::ranges::equal(known.bytes, bytes) ? known.layout : nullptr;
  }

  void keep(std::span<const std::byte> bytes, std::shared_ptr<const ParcelLayout> layout) {
    if (bytes.size() > kMostKeptBytes) return;
    Known replaced = std::exchange(place(bytes), {{bytes.begin(), bytes.end()}, std::move(layout)});
    // Dropped last: that may run any code.
  }

 private:
  struct Known {
    std::vector<std::byte> bytes;
    std::shared_ptr<const ParcelLayout> layout;
  };
  static constexpr size_t kPlaces = 64;
  static constexpr size_t kMostKeptBytes = 64 * 1024;

  Known& place(std::span<const std::byte> bytes) { return known_[place_of(bytes)]; }
  const Known& place(std::span<const std::byte> bytes) const { return known_[place_of(bytes)]; }

  static size_t place_of(std::span<const std::byte> bytes) {
    uint64_t hash = bytes.size();
    for (; bytes.size() >= sizeof(uint64_t); bytes = bytes.subspan(sizeof(uint64_t))) {
      uint64_t next = 0;
      std::memcpy(&next, bytes.data(), sizeof(next));
      hash = (hash ^ next) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 32;
    }
    for (const std::byte byte : bytes) hash = hash * 31 + static_cast<uint64_t>(byte);
    return hash % kPlaces;
  }

  std::array<Known, kPlaces> known_;
};

}  // namespace

py::handle parcel_device() {
  static PyObject* const made = THPDevice_New(c10::Device(c10::kCPU));  // never freed
  return made;
}

std::shared_ptr<const PackPlan> parcel_plan(const LeafTable& leaves) {
  return std::make_shared<const PackPlan>(make_pack_plan(leaves.extents(), PackOptions()));
}

std::shared_ptr<const ParcelLayout> read_layout(std::span<const std::byte> bytes,
                                                py::handle unpickle, uint64_t most_bytes) {
  std::shared_ptr<const ParcelLayout> layout = KnownLayouts::get().find(bytes);
  if (layout) return layout;
  layout = read_new_layout(bytes, unpickle, most_bytes);
  if (layout->pickled.is_none()) KnownLayouts::get().keep(bytes, layout);
  return layout;
}

}  // namespace tdcopier
