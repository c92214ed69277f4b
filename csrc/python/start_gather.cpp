// The index is copied, and then it is a copy like any other.
#include "python/start_gather.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "base/internal_error.h"
#include "python/device_argument.h"
#include "python/sources.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

RowIndex index_of(py::handle numbers, size_t lead) {
  check_invariant(THPVariable_Check(numbers.ptr()), "rows are numbered by a tensor");
  const at::Tensor& tensor = THPVariable_Unpack(numbers.ptr());
  check_invariant(tensor.scalar_type() == at::kLong && tensor.device().is_cpu() &&
                      tensor.is_contiguous() && lead >= 1,
                  "rows are numbered by int64 that lie together on the host");
  const auto* first = static_cast<const int64_t*>(tensor.const_data_ptr());
  return {{first, first + tensor.numel()}, tensor.sizes().vec(), lead};
}

}  // namespace

RowRequest request_of(RowNumbers rows, RowReaders readers) {
  return {index_of(rows.numbers, rows.lead),
          rows.counted,
          std::move(rows.sizes),
          readers.adjoining,
          std::move(readers.read),
          std::move(readers.flatten),
          std::move(readers.unflatten)};
}

std::unique_ptr<Handle> start_gather(py::handle storage, RowNumbers numbers, RowReaders readers,
                                     py::handle device, const CopyOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  const c10::Device target = parse_device(device);
  RowLeaves rows(request_of(std::move(numbers), std::move(readers)));
  return start_copy_to(target, storage, options, nullptr, &rows);
}

}  // namespace tdcopier
