// Binds parcels: names and argument conversion; no logic. tdcopier/_pack.py adds the methods that
// are written in Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/Device.h>

#include <memory>
#include <utility>

#include "engine/device/slab.h"
#include "python/bindings.h"
#include "python/calls/pack.h"
#include "python/runtime/guarded.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Parcels come from calls only, as handles do.
void make_parcel_type(PyHeapTypeObject* heap_type) {
  heap_type->ht_type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  heap_type->ht_type.tp_new = nullptr;
}

py::buffer_info buffer_of(const Parcel& parcel) {
  if (!parcel.device().is_cpu()) {
    throw py::buffer_error("the parcel is on " + parcel.device().str() + ", not on the host");
  }
  const auto bytes = static_cast<py::ssize_t>(parcel.bytes().nbytes());
  Slab::note_views(parcel.bytes());
  return {static_cast<uint8_t*>(parcel.bytes().mutable_data()), bytes,
          parcel.traits().is_read_only};
}

py::tuple parts_of_reserved(py::handle data, py::handle out) {
  Reserved made = reserve(data, out);
  return py::make_tuple(std::move(made.parcel), made.places);
}

}  // namespace

void bind_parcels(py::module_& m) {
  py::class_<Parcel> parcel(m, "Parcel", py::buffer_protocol(),
                            py::custom_type_setup(make_parcel_type), R"(
A nested batch as one run of bytes: what `pack` returns.

For example::

    tdcopier.pack(batch).save("batch.parcel")
    parcel = tdcopier.Parcel.load("batch.parcel")  # perhaps in another process
    print(parcel.nbytes, parcel.needs_pickle)
    batch = parcel.to("cuda")

It has the buffer protocol, so `bytes(parcel)`, `memoryview(parcel)`, files and sockets take all its
bytes without walking leaves. `start_copy` and the other calls of this package take it in the place
of its tree, anywhere in a batch. Its bytes change only if you write to them: to the leaves of
`tree()`, whose memory they are, or by `copy_into`.)");
  parcel.attr("__module__") = "tdcopier";
  parcel.def_buffer(&buffer_of)
      .def(
          "tree",
          [](const Parcel& self) {
            return with_torch_errors([&] { return self.tree(/*for_caller=*/true); });
          },
          R"(
Return the tree, built anew by each call.

Its leaves are views of the parcel's memory, without a copy. Each view keeps the whole parcel alive:
`clone()` one that outlives its batch by far. Leaves of a parcel in read-only memory, for example one
from `bytes`, are copied, and so are those of a loader's batch in a slab that is pinned: to pinned
memory of torch's. A parcel on a device gives leaves there with memory of their own, written on
the current stream. Values that were pickled are unpickled.

Raises:
    Exception: what the code of a pickled class raises.)")
      .def_property_readonly(
          "needs_pickle", [](const Parcel& self) { return self.needs_pickle(); },
          "Whether values of the tree are pickled in it, so that `from_buffer` needs "
          "`allow_pickle`.")
      .def_property_readonly(
          "nbytes", [](const Parcel& self) { return self.bytes().nbytes(); },
          "The number of bytes of header, layout and leaves together.")
      .def_property_readonly(
          "device",
          [](const Parcel& self) {
            return py::reinterpret_steal<py::object>(THPDevice_New(self.device()));
          },
          "The `torch.device` of the memory, which is that of the leaves that were packed.")
      .def(
          "is_pinned", [](const Parcel& self) { return self.is_pinned(); }, R"(
Return whether the leaves are in pinned memory, from which a device reads them without staging.)")
      .def_property_readonly("_is_read_only",
                             [](const Parcel& self) { return self.traits().is_read_only; })
      .def_property_readonly("_may_unpickle",
                             [](const Parcel& self) { return self.traits().may_unpickle; })
      .def_property_readonly("_head",
                             [](const Parcel& self) {
                               const auto head = self.head();
                               return py::bytes(reinterpret_cast<const char*>(head.data()),
                                                head.size());
                             })
      .def_property_readonly("_bytes", [](const Parcel& self) {
        Slab::note_views(self.bytes());
        return py::reinterpret_steal<py::object>(wrap_tensor(tensor_over(self.bytes())));
      });
  m.attr("PACKING_DEVICE") = packing_device();
  m.def("pack", guarded(&pack));
  m.def("reserve", guarded(&parts_of_reserved));
  m.def("parcel_from", guarded(&parcel_from), py::arg("buffer"), py::kw_only(),
        py::arg("may_unpickle"), py::arg("is_mapped") = false, py::arg("is_owned") = false,
        py::arg("head") = "");
}

}  // namespace tdcopier
