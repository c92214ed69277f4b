// Reads numpy arrays through pybind11's view of their memory layout: no numpy header, no import.
#include "python/runtime/array_leaf.h"

#include "python/runtime/hooks.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/strides.h>
#include <pybind11/numpy.h>

#include <optional>
#include <span>
#include <vector>

namespace py = pybind11;

namespace tdcopier {
namespace {

// Null until numpy is loaded; never released after that. GIL: held.
PyTypeObject* g_array_type = nullptr;
PyTypeObject* g_masked_array_type = nullptr;
PyTypeObject* g_mapped_array_type = nullptr;

// Looks up a class of a module that is already loaded; imports nothing.
void look_up(const char* module_name, const char* class_name, PyTypeObject*& type) {
  if (type != nullptr) return;
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), module_name);  // borrowed
  if (module == nullptr) return;
  py::object found = py::getattr(module, class_name, py::none());
  if (PyType_Check(found.ptr()) != 0) type = reinterpret_cast<PyTypeObject*>(found.release().ptr());
}

}  // namespace

void load_numpy_types() {
  look_up("numpy", "ndarray", g_array_type);
  look_up("numpy.ma", "MaskedArray", g_masked_array_type);
  look_up("numpy", "memmap", g_mapped_array_type);
}

namespace {

std::optional<c10::ScalarType> to_torch(char kind, py::ssize_t bytes) {
  using enum c10::ScalarType;
  switch (kind) {
    case 'b':
      return Bool;
    case 'i':
      return bytes == 1 ? Char : bytes == 2 ? Short : bytes == 4 ? Int : Long;
    case 'u':
      return bytes == 1 ? Byte : bytes == 2 ? UInt16 : bytes == 4 ? UInt32 : UInt64;
    case 'f':
      if (bytes == 2) return Half;
      if (bytes == 4) return Float;
      if (bytes == 8) return Double;
      return std::nullopt;
    case 'c':
      if (bytes == 8) return ComplexFloat;
      if (bytes == 16) return ComplexDouble;
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

bool is_number(char kind) {
  return kind == 'b' || kind == 'i' || kind == 'u' || kind == 'f' || kind == 'c';
}

py::array borrow(PyObject* array) {
  return py::reinterpret_borrow<py::array>(array);
}

// In C or Fortran order.
bool is_contiguous(const py::array& array) {
  return (array.flags() & (py::array::c_style | py::array::f_style)) != 0;
}

// Returns whether there are no gaps and no repeats, in any order of dimensions.
bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  const std::vector<int64_t> dense = at::infer_dense_strides(sizes, strides);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != dense[d]) return false;
  }
  return true;
}

}  // namespace

bool is_array_type(PyTypeObject* type) {
  return g_array_type != nullptr && PyType_IsSubtype(type, g_array_type) != 0;
}

ArrayKind classify_array(PyObject* object) {
  if (g_masked_array_type != nullptr && PyObject_TypeCheck(object, g_masked_array_type) != 0) {
    return ArrayKind::kOpaque;
  }
  const py::dtype dtype = borrow(object).dtype();
  // Kind V is a record or a number type of an extension, for example ml_dtypes' bfloat16.
  constexpr int kFirstUserType = 256;
  const bool registered = dtype.num() >= kFirstUserType;
  if (registered && (dtype.kind() == 'V' || is_number(dtype.kind()))) {
    return ArrayKind::kUnknownNumber;
  }
  if (!is_number(dtype.kind())) return ArrayKind::kOpaque;
  return to_torch(dtype.kind(), dtype.itemsize()) ? ArrayKind::kConvertible
                                                  : ArrayKind::kUnknownNumber;
}

bool is_mapped_array(PyObject* object) {
  return g_mapped_array_type != nullptr && PyObject_TypeCheck(object, g_mapped_array_type) != 0;
}

bool is_readable_array(PyObject* object) {
  const py::array array = borrow(object);
  const char order = array.dtype().byteorder();
  if (order != '=' && order != '|') return false;
  // Refuses empty arrays, for which torch chooses other strides, and sizes that exceed any memory,
  // for which numpy's byte count may overflow.
  uint64_t bytes = static_cast<uint64_t>(array.itemsize());
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    if (array.shape(i) == 0) return false;
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(array.shape(i)), &bytes)) return false;
  }
  return bytes <= kMaxLeafBytes;
}

void add_array_leaf(PyObject* object, LeafTable& leaves) {
  const py::array array = borrow(object);
  const py::dtype dtype = array.dtype();
  constexpr size_t kMostDims = 64;  // numpy's limit
  int64_t sizes[kMostDims];
  int64_t strides[kMostDims];
  const auto dims = static_cast<size_t>(array.ndim());
  bool torch_has_strides = true;
  for (size_t i = 0; i < dims; ++i) {
    sizes[i] = array.shape(i);
    strides[i] = array.strides(i) / array.itemsize();
    torch_has_strides &= array.strides(i) >= 0 && array.strides(i) % array.itemsize() == 0;
  }
  const c10::ScalarType scalar_type = *to_torch(dtype.kind(), dtype.itemsize());
  const at::IntArrayRef shape(sizes, dims);
  const at::IntArrayRef steps(strides, dims);
  if (torch_has_strides && (is_contiguous(array) || is_dense(shape, steps))) {
    leaves.add(array.data(), scalar_type, shape, steps);
    return;
  }
  // The strides that torch.from_numpy would give: of the array itself, or of a copy in C order.
  const std::vector<int64_t> dense = torch_has_strides
                                         ? at::infer_dense_strides(shape, steps)
                                         : at::IntArrayRef(c10::contiguous_strides(shape)).vec();
  leaves.add_strided(array.data(), scalar_type, shape, dense, {array.strides(), dims});
}

ArrayMemory memory_of_array(PyObject* object) {
  const py::array array = borrow(object);
  const py::dtype dtype = array.dtype();
  const py::ssize_t dims = array.ndim();
  return {static_cast<std::byte*>(const_cast<void*>(array.data())),
          array.writeable(),
          is_contiguous(array),
          *to_torch(dtype.kind(), dtype.itemsize()),
          {array.shape(), array.shape() + dims},
          {array.strides(), array.strides() + dims}};
}

py::object tensor_from_array(PyObject* array, bool is_result) {
  return hooks().as_tensor(py::handle(array), py::arg("is_result") = is_result);
}

std::string array_dtype_name(PyObject* array) {
  return py::str(borrow(array).dtype());
}

}  // namespace tdcopier
