#include "python/runtime/buffer_memory.h"

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstring>
#include <memory>

namespace py = pybind11;

namespace tdcopier {
namespace {

void release_buffer(void* context) {
  if (Py_IsInitialized() == 0) return;  // the interpreter has freed it
  const py::gil_scoped_acquire gil;
  const std::unique_ptr<Py_buffer> buffer(static_cast<Py_buffer*>(context));
  PyBuffer_Release(buffer.get());
}

void release_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

}  // namespace

BufferMemory memory_of_buffer(py::handle object) {
  auto buffer = std::make_unique<Py_buffer>();
  bool is_read_only = false;
  // Its bytes, whatever their format: that is asked for with the shape, which must be contiguous.
  constexpr int kReadable = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
  if (PyObject_GetBuffer(object.ptr(), buffer.get(), kReadable | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    is_read_only = true;
    if (PyObject_GetBuffer(object.ptr(), buffer.get(), kReadable) != 0) {
      throw py::error_already_set();
    }
  }
  if (buffer->format != nullptr && std::strchr(buffer->format, 'O') != nullptr) {
    PyBuffer_Release(buffer.get());
    throw py::type_error("memory of Python objects cannot have a parcel");
  }
  void* const data = buffer->buf;
  const auto bytes = static_cast<size_t>(buffer->len);
  c10::DataPtr memory(data, buffer.release(), &release_buffer, c10::Device(c10::kCPU));
  return {c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                       c10::GetAllocator(c10::kCPU), /*resizable=*/false),
          is_read_only};
}

c10::Storage part_of_memory(const c10::Storage& whole, uint64_t begin, uint64_t bytes) {
  auto* const data = static_cast<std::byte*>(whole.mutable_data()) + begin;
  c10::DataPtr memory(data, new c10::Storage(whole), &release_storage, whole.device());
  return {c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(memory),
          c10::GetAllocator(whole.device_type()), /*resizable=*/false};
}

}  // namespace tdcopier
