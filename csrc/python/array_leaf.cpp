// numpy arrays, through pybind11's view of their memory layout: no numpy header, no import.
#include "python/array_leaf.h"

#include <pybind11/numpy.h>

#include <optional>

namespace py = pybind11;

namespace tdcopier {
namespace {

// Null until numpy is loaded; kept for good from then on. GIL: held.
PyTypeObject* g_array_type = nullptr;
PyTypeObject* g_masked_array_type = nullptr;

// A class of a module that is loaded; never imports one.
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

}  // namespace

ArrayKind classify_array(PyObject* object) {
  if (g_array_type == nullptr || PyObject_TypeCheck(object, g_array_type) == 0) {
    return ArrayKind::kNotAnArray;
  }
  if (g_masked_array_type != nullptr && PyObject_TypeCheck(object, g_masked_array_type) != 0) {
    return ArrayKind::kOpaque;
  }
  const py::dtype dtype = borrow(object).dtype();
  if (!is_number(dtype.kind())) return ArrayKind::kOpaque;
  return to_torch(dtype.kind(), dtype.itemsize()) ? ArrayKind::kConvertible
                                                  : ArrayKind::kUnknownNumber;
}

bool add_array_leaf(PyObject* object, LeafTable& leaves) {
  const py::array array = borrow(object);
  const py::dtype dtype = array.dtype();
  const bool contiguous = (array.flags() & (py::array::c_style | py::array::f_style)) != 0;
  const bool native = dtype.byteorder() == '=' || dtype.byteorder() == '|';
  if (!contiguous || !native || array.size() == 0) return false;
  constexpr size_t kMostDims = 64;  // numpy's own bound
  int64_t sizes[kMostDims];
  int64_t strides[kMostDims];
  const auto dims = static_cast<size_t>(array.ndim());
  for (size_t i = 0; i < dims; ++i) {
    if (array.strides(i) % array.itemsize() != 0) return false;
    sizes[i] = array.shape(i);
    strides[i] = array.strides(i) / array.itemsize();
    if (strides[i] < 0) return false;
  }
  leaves.add(array.data(), *to_torch(dtype.kind(), dtype.itemsize()), {sizes, dims},
             {strides, dims});
  return true;
}

std::string array_dtype_name(PyObject* array) {
  return py::str(borrow(array).dtype());
}

}  // namespace tdcopier
