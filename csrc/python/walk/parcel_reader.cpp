// Reads layouts. Each byte may be anything: a number is checked before it is used, and a node
// before what it has.
#include "python/walk/parcel_layout.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Size.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "python/runtime/hooks.h"
#include "python/walk/known_layouts.h"
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

using BatchSize = std::vector<int64_t>;

class LayoutReader {
 public:
  LayoutReader(std::span<const std::byte> bytes, uint64_t most_bytes, bool may_import)
      : from_(bytes), bytes_left_(most_bytes), may_import_(may_import) {}

  std::shared_ptr<const ParcelLayout> read() {
    const std::string_view pickled = from_.text(from_.number());
    layout_ = std::make_shared<ParcelLayout>();
    has_pickle_ = !pickled.empty();
    if (has_pickle_) layout_->pickled = py::bytes(pickled.data(), pickled.size());
    std::vector<uint64_t> memory(from_.count(1));
    for (uint64_t& bytes : memory) {
      bytes = from_.number();
      take_bytes(bytes);
    }
    read_node(0, nullptr);
    if (from_.left() != 0) throw MalformedBytes("bytes follow the tree");
    for (const uint64_t bytes : memory) {
      const auto size = static_cast<int64_t>(bytes);
      const int64_t stride = 1;
      layout_->leaves.add(nullptr, c10::ScalarType::Byte, {&size, 1}, {&stride, 1});
    }
    layout_->memory = static_cast<uint32_t>(memory.size());
    const bool is_of_small = std::ranges::none_of(
        layout_->leaves.all(), [](const Leaf& leaf) { return c10::elementSize(leaf.dtype) > 8; });
    if (memory.empty() && is_of_small) layout_->address_bytes = 8;
    PackPlan plan = parcel_plan(layout_->leaves);
    for (ChunkPlan& chunk : plan.chunks) chunk.as_source = true;
    layout_->plan = std::make_shared<const PackPlan>(std::move(plan));
    return std::move(layout_);
  }

 private:
  ParcelToken token() {
    const uint8_t found = from_.byte();
    if (found > static_cast<uint8_t>(ParcelToken::kLast)) throw MalformedBytes("an unknown token");
    return static_cast<ParcelToken>(found);
  }

  void take_bytes(uint64_t bytes) {
    if (bytes > bytes_left_) throw MalformedBytes("the leaves need more bytes than there are");
    bytes_left_ -= bytes;
  }

  // `batch_size`: of the TensorDict that has the node as an entry, or null.
  void read_node(int depth, const BatchSize* batch_size) {
    if (depth > kMaxDepth) throw MalformedBytes("the tree is nested too deep");
    TreeSpec& spec = layout_->spec;
    const ParcelToken found = token();
    switch (found) {
      case ParcelToken::kList:
      case ParcelToken::kTuple:
        refuse_entry(batch_size);
        spec.add(found == ParcelToken::kList ? NodeKind::kList : NodeKind::kTuple, from_.count(1));
        return read_children(depth);
      case ParcelToken::kDict:
        refuse_entry(batch_size);
        return read_items(NodeKind::kDict, depth, nullptr);
      case ParcelToken::kCustom:
        spec.add(NodeKind::kCustom, from_.count(1));
        if (add_value(PickledPlace::Needs::kNothing)) {
          throw MalformedBytes("what builds a container is not in the pickle");
        }
        add_value(PickledPlace::Needs::kNothing);
        return read_children(depth);
      case ParcelToken::kRebuilt:
        refuse_entry(batch_size);
        spec.add(NodeKind::kCustom, from_.count(1));
        add_parts_of_rebuilt();
        return read_children(depth);
      case ParcelToken::kTensorDict: {
        const BatchSize its = read_state_of_tensordict();
        if (batch_size != nullptr) check_begins_with(its, *batch_size);
        return read_items(NodeKind::kTensorDict, depth, &its);
      }
      case ParcelToken::kTensorClass:
        spec.add(NodeKind::kTensorClass, 1);
        add_value(PickledPlace::Needs::kClass);
        add_value(PickledPlace::Needs::kDict);
        return read_tensordict_of_class(depth + 1, batch_size);
      case ParcelToken::kLeaf:
      case ParcelToken::kPermuted:
        return read_leaf(found == ParcelToken::kPermuted, batch_size);
      case ParcelToken::kValue:
        return read_opaque(batch_size);
      default:
        throw MalformedBytes("a value where a node is expected");
    }
  }

  void read_tensordict_of_class(int depth, const BatchSize* batch_size) {
    const size_t node = layout_->spec.nodes();
    read_node(depth, batch_size);
    const NodeKind found = layout_->spec.node(node).kind;
    if (found != NodeKind::kTensorDict) {
      throw MalformedBytes("a tensorclass has no TensorDict");
    }
  }

  static void refuse_entry(const BatchSize* batch_size) {
    if (batch_size != nullptr) throw MalformedBytes("an entry of a TensorDict is no tensor");
  }

  static void check_begins_with(std::span<const int64_t> sizes, const BatchSize& batch_size) {
    const bool fits = sizes.size() >= batch_size.size() &&
                      std::ranges::equal(sizes.first(batch_size.size()), batch_size);
    if (!fits) throw MalformedBytes("an entry of a TensorDict has another batch size");
  }

  void read_children(int depth) {
    const uint32_t count = layout_->spec.node(layout_->spec.nodes() - 1).number;
    for (uint32_t i = 0; i < count; ++i) read_node(depth + 1, nullptr);
  }

  void read_items(NodeKind kind, int depth, const BatchSize* batch_size) {
    const size_t count = from_.count(kLeastEntryBytes);
    layout_->spec.add(kind, count);
    for (size_t i = 0; i < count; ++i) {
      const py::object key = add_value(PickledPlace::Needs::kNothing);
      const bool is_text = key && PyUnicode_CheckExact(key.ptr());
      if (kind == NodeKind::kTensorDict && !is_text) throw MalformedBytes("a key is no text");
      read_node(depth + 1, batch_size);
    }
  }

  void read_opaque(const BatchSize* batch_size) {
    TreeSpec& spec = layout_->spec;
    spec.add(NodeKind::kReady, 0);
    const size_t node = spec.nodes() - 1;
    const ParcelToken found = token();
    if (found == ParcelToken::kPickled) {
      const size_t value = read_index_of_pickled();
      const size_t place = spec.set_ready(node, Py_NewRef(Py_None));
      const bool is_entry = batch_size != nullptr;
      const auto needs = is_entry ? PickledPlace::Needs::kEntry : PickledPlace::Needs::kNothing;
      layout_->places.push_back({false, needs, place, value});
    } else {
      refuse_entry(batch_size);
      spec.set_ready(node, read_value(found, 0).release().ptr());
    }
    ++layout_->opaque;
  }

  // Adds a value as a key of the spec, and returns it; null for one that is pickled.
  py::object add_value(PickledPlace::Needs needs) {
    TreeSpec& spec = layout_->spec;
    const ParcelToken found = token();
    if (found == ParcelToken::kPickled) {
      const size_t value = read_index_of_pickled();
      layout_->places.push_back({true, needs, spec.keys().size(), value});
      spec.add_key(Py_None);
      return {};
    }
    if (needs != PickledPlace::Needs::kNothing) throw MalformedBytes("a node needs a pickle");
    py::object value = read_value(found, 0);
    spec.add_key(value.ptr());
    return value;
  }

  // The functions that build other containers run code, so only a pickle can name them.
  void add_parts_of_rebuilt() {
    const uint32_t children = layout_->spec.node(layout_->spec.nodes() - 1).number;
    const py::object module = read_value(token(), 0);
    const py::object name = read_value(token(), 0);
    const py::object value = read_value(token(), 0);
    const py::tuple parts = hooks().from_packed_form(module, name, value, children, may_import_);
    layout_->classes.append(py::make_tuple(module, name, parts[0]));
    layout_->spec.add_key(py::object(parts[1]).ptr());
    layout_->spec.add_key(py::object(parts[2]).ptr());
  }

  // Adds its keys but for those of its entries, and returns its batch size.
  BatchSize read_state_of_tensordict() {
    TreeSpec& spec = layout_->spec;
    const py::object batch_size = read_value(token(), 0);
    if (!THPSize_Check(batch_size.ptr())) throw MalformedBytes("a batch size is no torch.Size");
    BatchSize sizes;
    for (const py::handle size : batch_size) sizes.push_back(size.cast<int64_t>());
    if (std::ranges::any_of(sizes, [](int64_t size) { return size < 0; })) {
      throw MalformedBytes("a batch size is negative");
    }
    const py::object names = read_value(token(), 0);
    if (!names.is_none() && !are_names(names, sizes.size())) {
      throw MalformedBytes("a TensorDict has other names than dimensions");
    }
    spec.add_key(tensordict_class().ptr());
    spec.add_key(batch_size.ptr());
    spec.add_key(names.ptr());
    spec.add_key(parcel_device().ptr());
    spec.add_key(read_value(token(), 0).is(py::bool_(true)) ? Py_True : Py_False);
    return sizes;
  }

  // Returns whether it is a tuple of different texts, or None for dimensions without a name.
  static bool are_names(const py::object& names, size_t count) {
    if (!PyTuple_CheckExact(names.ptr()) || py::len(names) != count) return false;
    py::set seen;
    size_t named = 0;
    for (const py::handle name : names) {
      if (name.is_none()) continue;
      if (!PyUnicode_CheckExact(name.ptr())) return false;
      seen.add(name);
      ++named;
    }
    return seen.size() == named;
  }

  void read_leaf(bool permuted, const BatchSize* batch_size) {
    const uint8_t code = from_.byte();
    if (code >= kParcelDtypes.size()) throw MalformedBytes("an unknown dtype");
    const c10::ScalarType dtype = kParcelDtypes[code];
    const uint8_t dims = from_.byte();
    if (dims > kMostDims) throw MalformedBytes("a leaf has too many dimensions");
    std::array<int64_t, 2 * kMostDims> shape;
    const std::span<int64_t> sizes(shape.data(), dims);
    const std::span<int64_t> strides(shape.data() + kMostDims, dims);
    constexpr auto kMost = static_cast<int64_t>(kMaxLeafBytes);
    int64_t elements = 1;
    bool is_empty = false;
    for (int64_t& size : sizes) {
      const uint64_t found = from_.number();
      if (found > kMaxLeafBytes) throw MalformedBytes("a leaf is too large");
      size = static_cast<int64_t>(found);
      is_empty |= size == 0;
      if (__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements) ||
          elements > kMost) {
        throw MalformedBytes("a leaf is too large");
      }
    }
    if (permuted) {
      read_strides(sizes, strides, is_empty);
    } else {
      int64_t next = 1;
      for (size_t d = dims; d-- > 0;) {
        strides[d] = next;
        next *= std::max<int64_t>(sizes[d], 1);
      }
    }
    const uint64_t bytes = static_cast<uint64_t>(elements) * c10::elementSize(dtype);
    if (bytes > kMaxLeafBytes) throw MalformedBytes("a leaf is too large");
    take_bytes(is_empty ? 0 : bytes);
    if (batch_size != nullptr) check_begins_with(sizes, *batch_size);
    layout_->spec.add(NodeKind::kLeaf, layout_->leaves.size());
    layout_->leaves.add(nullptr, dtype, sizes, strides);
  }

  // Its elements are one run of bytes, in any order of dimensions: so it has none of its
  // neighbours, and none twice. Strides that are not used may be anything.
  void read_strides(std::span<const int64_t> sizes, std::span<int64_t> strides, bool is_empty) {
    for (int64_t& stride : strides) {
      const uint64_t found = from_.number();
      if (found > kMostStride) throw MalformedBytes("a stride is too large");
      stride = static_cast<int64_t>(found);
    }
    if (!is_empty && !are_one_run(sizes, strides)) {
      throw MalformedBytes("the elements of a leaf are not one run");
    }
  }

  static bool are_one_run(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
    std::array<size_t, kMostDims> dims;
    const auto last = std::ranges::copy_if(std::views::iota(size_t{0}, sizes.size()), dims.begin(),
                                           [&](size_t d) { return sizes[d] != 1; })
                          .out;
    std::ranges::sort(dims.begin(), last, {}, [&](size_t d) { return strides[d]; });
    int64_t next = 1;
    return std::all_of(dims.begin(), last, [&](size_t d) {
      return strides[d] == std::exchange(next, next * sizes[d]);
    });
  }

  // Reads a value that is not pickled, after its token.
  py::object read_value(ParcelToken found, int depth) {
    if (depth > kMaxDepth) throw MalformedBytes("a value is nested too deep");
    switch (found) {
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
        for (size_t i = 0; i < count; ++i) items.append(read_value(token(), depth + 1));
        return py::tuple(items);
      }
      case ParcelToken::kSizes:
        return read_sizes();
      case ParcelToken::kBytes: {
        const std::string_view bytes = from_.text(from_.number());
        return py::bytes(bytes.data(), bytes.size());
      }
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

  // How many there are is known when they are unpickled.
  size_t read_index_of_pickled() {
    if (!has_pickle_) throw MalformedBytes("a pickled value, and no pickle");
    return static_cast<size_t>(from_.number());
  }

  ByteReader from_;
  uint64_t bytes_left_;  // for further leaves
  const bool may_import_;
  bool has_pickle_ = false;
  std::vector<py::object> texts_;
  std::shared_ptr<ParcelLayout> layout_;
};

constexpr size_t kMostLayoutBytes = size_t{1} << 31;  // so that 32 bits are enough to number nodes

}  // namespace

py::handle parcel_device() {
  static PyObject* const made = THPDevice_New(c10::Device(c10::kCPU));  // never freed
  return made;
}

py::handle packing_device() {
  static PyObject* const made = THPDevice_New(c10::Device(c10::kCPU));  // never freed
  return made;
}

PackPlan parcel_plan(const LeafTable& leaves) {
  return make_pack_plan(leaves.extents(), PackOptions());
}

const std::shared_ptr<const PackPlan>& ParcelLayout::pinned_plan() const {
  if (!pinned_plan_) {
    PackPlan made = *plan;
    for (ChunkPlan& chunk : made.chunks) chunk.pinned = true;
    pinned_plan_ = std::make_shared<const PackPlan>(std::move(made));
  }
  return pinned_plan_;
}

std::shared_ptr<const ParcelLayout> read_layout(std::span<const std::byte> bytes,
                                                uint64_t most_bytes, bool may_import) {
  std::shared_ptr<const ParcelLayout> layout = KnownLayouts::get().find(bytes);
  if (layout) return layout;
  if (bytes.size() > kMostLayoutBytes) throw MalformedBytes("the layout is too long");
  layout = LayoutReader(bytes, most_bytes, may_import).read();
  KnownLayouts::get().keep(bytes, layout);
  return layout;
}

}  // namespace tdcopier
