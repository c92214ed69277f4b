// Asks Python about each pair. Rows that a device numbers are checked here.
#include "python/walk/delegated_pairs.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>

#include "python/runtime/hooks.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Torch cannot move the rows of a host table by numbers that a device has.
void refuse_numbers_on_device(const DelegatedPair& pair, TablesOfPairs tables,
                              const PathOfEnd& path) {
  const py::object& table = tables.are_sources ? pair.source : pair.destination;
  if (!tables.rows->are_numbers_on_device() || !tensor_in(table.ptr()).device().is_cpu()) return;
  const py::object& other = tables.are_sources ? pair.destination : pair.source;
  const at::Tensor& values = tensor_in(other.ptr());
  const c10::Device device = tables.rows->numbers_device();
  if (values.device() != device || values.requires_grad() || !values.is_contiguous()) {
    throw py::value_error(path(pair.number, /*written=*/tables.are_sources) +
                          " is no contiguous tensor on " + device.str() +
                          " without gradients, which an index there needs. Give one, or "
                          "index.cpu()");
  }
  throw py::value_error(path(pair.number, /*written=*/!tables.are_sources) +
                        " cannot be accessed by the device that has the index: " +
                        RowLeaves::needs_for_device() + ". Give index.cpu()");
}

}  // namespace

void check_delegated_pairs(const std::vector<DelegatedPair>& pairs, TablesOfPairs tables,
                           const PathOfEnd& path) {
  if (pairs.empty()) return;
  for (const DelegatedPair& pair : pairs) {
    py::object shape = py::none();
    if (tables.rows != nullptr) {
      const py::object& table = tables.are_sources ? pair.source : pair.destination;
      const c10::DimVector sizes = tables.rows->shape_in(tensor_in(table.ptr()).sizes());
      shape = py::cast(at::IntArrayRef(sizes).vec());
    }
    const py::object wrong =
        hooks().mismatch(pair.source, pair.destination, shape, tables.are_sources);
    if (wrong.is_none()) {
      if (tables.rows != nullptr) refuse_numbers_on_device(pair, tables, path);
      continue;
    }
    throw py::value_error(py::str(
        wrong.attr("format")(py::arg("source") = path(pair.number, /*written=*/false),
                             py::arg("destination") = path(pair.number, /*written=*/true))));
  }
}

}  // namespace tdcopier
