// Asks Python about each class, and the engine about each device, once.
#include "python/walk/pair_leaf.h"

#include <c10/core/InferenceMode.h>

#include <stdexcept>

#include "python/runtime/array_leaf.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/hooks.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

std::optional<PlainLeaf> read_array(PyObject* array, bool written) {
  if (!is_readable_array(array)) return std::nullopt;  // only numpy can read its elements
  ArrayMemory memory = memory_of_array(array);
  if (written && !memory.writeable) return std::nullopt;
  return PlainLeaf{c10::kCPU,
                   memory.data,
                   nullptr,
                   memory.dtype,
                   std::move(memory.sizes),
                   std::move(memory.strides_bytes),
                   memory.dense};
}

}  // namespace

bool PlainLeaf::has_steps(at::IntArrayRef others_bytes) const {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides_bytes[d] != others_bytes[d]) return false;
  }
  return true;
}

std::optional<PlainLeaf> PlainLeafReader::read(PyObject* leaf, bool written) {
  if (is_array_type(Py_TYPE(leaf))) return read_array(leaf, written);
  if (tables_.rows == nullptr && !is_plain_class(leaf)) return std::nullopt;
  return read_tensor(tensor_in(leaf), written);
}

std::optional<PlainLeaf> PlainLeafReader::read_tensor(const at::Tensor& tensor, bool written) {
  if (written && tensor.is_inference() && !c10::InferenceMode::is_enabled()) {
    throw std::runtime_error(path_(written) +
                             " was made in inference mode, and can be written in place only "
                             "there: make the call in inference mode, or give a clone()");
  }
  const std::optional<c10::DispatchKeySet> keys = keys_of(tensor.device());
  if (!keys) return std::nullopt;
  const PlainTensor plain = look_at(tensor, *keys);
  if (plain.packable == Packable::kShortStorage) {
    throw py::value_error(path_(written) + why_out_of_reach(tensor));
  }
  if (plain.packable != Packable::kYes) return std::nullopt;
  const void* memory = written ? plain.storage->mutable_data() : plain.storage->data();
  PlainLeaf leaf{tensor.device(),
                 static_cast<std::byte*>(const_cast<void*>(memory)) + plain.begin,
                 plain.storage,
                 tensor.scalar_type(),
                 c10::DimVector(tensor.sizes()),
                 c10::DimVector(tensor.strides()),
                 plain.dense};
  for (int64_t& stride : leaf.strides_bytes) stride *= static_cast<int64_t>(tensor.itemsize());
  if (tables_.rows == nullptr) return leaf;
  const bool is_table = written != tables_.are_sources;
  if (is_table && leaf.device.is_cpu()) {
    leaf.table = look_at_rows(tensor, tables_.rows->index()->lead);
  }
  const bool possible = is_table ? leaf.table.has_value() : tensor.is_contiguous();
  return possible ? std::optional(std::move(leaf)) : std::nullopt;
}

// Returns whether the object is a tensor of torch's own class, or of a class whose memory is that
// of a plain tensor.
bool PlainLeafReader::is_plain_class(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (is_plain_tensor_class(type)) return true;
  if (!is_tensor(object)) return false;
  for (const auto& [known, plain] : classes_) {
    if (known == type) return plain;
  }
  const py::object answer = hooks().is_plain_class(py::handle(reinterpret_cast<PyObject*>(type)));
  classes_.emplace_back(type, answer.cast<bool>());
  return classes_.back().second;
}

// Returns the key set of plain tensors on a device; nullopt if the engine does not reach it.
std::optional<c10::DispatchKeySet> PlainLeafReader::keys_of(c10::Device device) {
  for (const auto& [known, keys] : keys_) {
    if (known == device) return keys;
  }
  const bool reached = device.is_cpu() || has_engine_transfers(device);
  keys_.emplace_back(device, reached ? std::optional(plain_tensor_keys(device)) : std::nullopt);
  return keys_.back().second;
}

}  // namespace tdcopier
