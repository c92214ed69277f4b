// Binds pinned memory, leases of it, and the memory of storages that are parked: names and argument
// conversion; no logic.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/device/recorded_streams.h"
#include "python/bindings.h"
#include "python/calls/leased_tensors.h"
#include "python/calls/pin_memory.h"
#include "python/calls/storage_memory.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/guarded.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {

void bind_memory(py::module_& m) {
  py::class_<PinnedMemory> pinned_memory(m, "PinnedMemory", R"(
Memory that `pin_memory_` has pinned.

For example::

    memory = tdcopier.pin_memory_(dataset.tensors)
    print(f"{memory.nbytes / 1e9:.1f} GB are pinned")
    memory.close()

It stays pinned, and alive, until `close`, the end of a `with` block, or the end of this object.)");
  pinned_memory.attr("__module__") = "tdcopier.pinned";
  pinned_memory
      .def(py::init([](py::handle data, py::handle device) {
        return with_torch_errors([&] { return std::make_unique<PinnedMemory>(data, device); });
      }))
      .def("close", guarded(&PinnedMemory::close), R"(
Unpin the memory, after all work that is enqueued on any device. Blocks for that long.

Memory that another `PinnedMemory` names too stays pinned. A second call does nothing. No other
thread may start a copy or a gather from the memory meanwhile.

Raises:
    Exception: the error of a device that cannot be waited for, for example while a stream is
        capturing a CUDA graph. The memory stays pinned then.)")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__",
           [](PinnedMemory& self, const py::args&) { with_torch_errors([&] { self.close(); }); })
      .def_property_readonly("nbytes", &PinnedMemory::bytes,
                             "Bytes of memory that this keeps pinned; 0 when it is closed.")
      .def_property_readonly("closed", &PinnedMemory::is_closed);

  py::class_<LeasedTensors>(m, "LeasedTensors")
      .def(py::init([](const std::vector<uint64_t>& sizes, py::handle device) {
        return with_torch_errors([&] { return std::make_unique<LeasedTensors>(sizes, device); });
      }))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", guarded(&LeasedTensors::next));
  m.def("reserve_pinned", guarded(&reserve_pinned));
  m.def("trim_pinned", guarded(&trim_pinned));
  m.def("wait_for_release", guarded(&wait_for_release));
  m.def("pinned_use", guarded(&pinned_use));
  m.def("set_pinned_limit_bytes", &set_pinned_limit);

  py::native_enum<MemoryPlace>(m, "MemoryPlace", "enum.Enum")
      .value("UNKNOWN", MemoryPlace::kUnknown)
      .value("HOST", MemoryPlace::kHost)
      .value("DEVICE", MemoryPlace::kDevice)
      .value("OTHER_DEVICE", MemoryPlace::kOtherDevice)
      .finalize();
  py::class_<StorageMemory>(m, "StorageMemory")
      .def(py::init([](const py::list& tensors) {
        return with_torch_errors([&] { return std::make_unique<StorageMemory>(tensors); });
      }))
      .def_property_readonly("numbers", &StorageMemory::numbers)
      .def_property_readonly("sizes_bytes", &StorageMemory::sizes_bytes)
      .def("tensors",
           [](const StorageMemory& self) {
             return with_torch_errors([&] { return self.tensors(); });
           })
      .def("like",
           [](const StorageMemory& self, const py::list& tensors, const py::list& bytes) {
             return with_torch_errors([&] { return self.like(tensors, bytes); });
           })
      .def("take_out", guarded(&StorageMemory::take_out))
      .def("are_waiting", &StorageMemory::are_waiting)
      .def("put_in", guarded(&StorageMemory::put_in))
      .def("release_kept", &StorageMemory::release_kept)
      .def_property_readonly("is_out", &StorageMemory::is_out)
      .attr("MISSING") = StorageMemory::kMissing;

  m.def("place_of", [](py::handle tensor) {
    if (!is_tensor(tensor.ptr())) throw py::type_error("place_of() takes a tensor");
    return place_of(tensor_in(tensor.ptr()));
  });
  m.def("over_bytes", [](py::handle bytes, py::handle tensor) {
    return with_torch_errors([&] {
      at::Tensor made = over_bytes(tensor_in(bytes.ptr()), tensor_in(tensor.ptr()));
      return py::reinterpret_steal<py::object>(wrap_tensor(std::move(made)));
    });
  });
  m.def("parts_of_bytes", [](py::handle bytes, const std::vector<int64_t>& begins,
                             const std::vector<int64_t>& sizes) {
    return with_torch_errors([&] { return parts_of_bytes(tensor_in(bytes.ptr()), begins, sizes); });
  });
  m.def("empty_bytes", [](int64_t bytes, py::handle stream) {
    return with_torch_errors(
        [&] { return py::reinterpret_steal<py::object>(wrap_tensor(empty_bytes(bytes, stream))); });
  });
  m.def("pack_bytes", [](const py::list& parts, py::handle chunk,
                         const std::vector<int64_t>& begins, py::handle stream, bool record) {
    return with_torch_errors(
        [&] { return pack_bytes(parts, tensor_in(chunk.ptr()), begins, stream, record); });
  });
  m.def("record_stream", [](py::handle tensor, py::handle stream) {
    with_torch_errors([&] {
      const at::Tensor& recorded = tensor_in(tensor.ptr());
      record_stream(recorded.storage(), parse_stream(stream, recorded.device()));
    });
  });
  m.attr("EMPTY_STORAGES_RAISE") = kEmptyStoragesRaise;
}

}  // namespace tdcopier
