#include "python/walk/buffer_memory.h"

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "python/walk/sources.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Drops a memoryview, which lets its object go. Without the GIL, which torch releases while it
// frees the memory of a tensor, later: a worker that waited for the GIL could deadlock with a
// caller that waits for the worker.
void release_view(void* context) {
  auto* const view = static_cast<PyObject*>(context);
  if (Py_IsInitialized() == 0) return;  // the interpreter has freed it
  if (PyGILState_Check() != 0) return Py_DECREF(view);
  drop_later(view);
}

void release_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

}  // namespace

BufferMemory memory_of_buffer(py::handle object) {
  auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(object.ptr()));
  if (!view) throw py::error_already_set();
  const Py_buffer& buffer = *PyMemoryView_GET_BUFFER(view.ptr());
  if (PyBuffer_IsContiguous(&buffer, 'C') == 0) {
    throw py::value_error("the memory of a parcel must be contiguous");
  }
  if (buffer.format != nullptr && std::strchr(buffer.format, 'O') != nullptr) {
    throw py::type_error("memory of Python objects cannot have a parcel");
  }
  const bool is_read_only = buffer.readonly != 0;
  const auto bytes = static_cast<size_t>(buffer.len);
  c10::DataPtr memory(buffer.buf, view.release().ptr(), &release_view, c10::Device(c10::kCPU));
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
