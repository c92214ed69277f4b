// Binds slabs: names and argument conversion; no logic. tdcopier/_slabs.py decides which one a
// batch gets, and which are kept.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/device/slab.h"
#include "python/bindings.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/guarded.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/parcel.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Raises OSError for what the system refuses.
template <typename Call>
auto with_system_errors(const Call& call) {
  return with_torch_errors([&] {
    try {
      return call();
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
      throw py::error_already_set();
    }
  });
}

Slab::Token token_in(const py::bytes& bytes) {
  const std::string given = bytes;
  Slab::Token token{};
  if (given.size() != token.size()) throw py::value_error("a token has 16 bytes");
  std::ranges::copy(std::as_bytes(std::span(given)), token.begin());
  return token;
}

py::object take(Slab& slab, size_t bytes) {
  if (bytes > slab.bytes()) throw py::value_error("the slab is smaller");
  const c10::Storage memory = slab.take(bytes);
  if (!memory) return py::none();
  return py::reinterpret_steal<py::object>(wrap_tensor(tensor_over(memory)));
}

std::unique_ptr<Parcel> receive(Slab& slab, size_t bytes) {
  return Parcel::read(slab.receive(bytes), {.may_unpickle = true});
}

py::object pin(Slab& slab, py::handle device) {
  const c10::Device parsed = parse_device(device);
  std::optional<std::string> why_not;
  {
    const WithoutGil no_gil;
    why_not = slab.pin(parsed);
  }
  return py::cast(why_not);
}

// Lets go of slabs whose last objects are in the list. Unpins without the GIL.
void drop_slabs(py::list slabs) {
  std::vector<std::shared_ptr<Slab>> kept;
  for (const py::handle each : slabs) kept.push_back(each.cast<std::shared_ptr<Slab>>());
  slabs.attr("clear")();
  const WithoutGil no_gil;
  kept.clear();
}

}  // namespace

void bind_slabs(py::module_& m) {
  py::class_<Slab, std::shared_ptr<Slab>>(m, "Slab")
      .def_static(
          "make",
          [](size_t bytes) { return with_system_errors([&] { return Slab::make(bytes); }); })
      .def_static("open",
                  [](const std::string& path, const py::bytes& token) {
                    return with_system_errors([&] { return Slab::open(path, token_in(token)); });
                  })
      .def_static("of", [](const Parcel& parcel) { return Slab::of(parcel.bytes()); })
      .def_static("of_tensor",
                  [](py::handle tensor) -> std::shared_ptr<Slab> {
                    if (!is_tensor(tensor.ptr())) return nullptr;
                    return Slab::of(tensor_in(tensor.ptr()).storage());
                  })
      .def_property_readonly("nbytes", &Slab::bytes)
      .def_property_readonly("token",
                             [](const Slab& self) {
                               const auto& token = self.token();
                               return py::bytes(reinterpret_cast<const char*>(token.data()),
                                                token.size());
                             })
      .def_property_readonly("descriptor", &Slab::descriptor)
      .def("take", guarded(&take))
      .def("send", &Slab::send)
      .def("retire", &Slab::retire)
      .def("close_if_received", &Slab::close_if_received)
      .def("receive", guarded(&receive))
      .def_property_readonly("is_retired", &Slab::is_retired)
      .def("pin", guarded(&pin));
  m.def("drop_slabs", guarded(&drop_slabs));
  m.def("pinned_slab_bytes", &Slab::pinned_bytes_of_all);
  m.def("set_slab_limit_bytes", &Slab::set_limit_bytes);
  m.def("slab_limit_bytes", &Slab::limit_bytes);
}

}  // namespace tdcopier
