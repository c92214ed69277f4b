// Implements constructors, parts and copies of sparse tensors; other operators run on the host.
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_dimI_native.h>
#include <ATen/ops/_dimV_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/ccol_indices_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/col_indices_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/crow_indices_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/is_pinned_native.h>
#include <ATen/ops/permute_native.h>
#include <ATen/ops/resize_as_sparse_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/row_indices_native.h>
#include <ATen/ops/select_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unsqueeze_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/zero_native.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <utility>

#include "sim/registrations.h"
#include "sim/runtime.h"

namespace tdcopier::sim {

namespace {

void find(std::optional<c10::Device>& found, const at::Tensor& tensor) {
  if (!found && tensor.defined() && tensor.device().type() == kDeviceType) found = tensor.device();
}
void find(std::optional<c10::Device>& found, const std::optional<c10::Device>& device) {
  if (!found) found = device;
}
template <typename Other>
void find(std::optional<c10::Device>& /*found*/, const Other& /*no device*/) {}

template <auto kFunction>
struct OnDevice;

template <typename Result, typename... Arguments, Result (*kFunction)(Arguments...)>
struct OnDevice<kFunction> {
  static Result call(Arguments... arguments) {
    std::optional<c10::Device> device;
    (find(device, arguments), ...);
    const c10::OptionalDeviceGuard guard(device);
    return kFunction(std::forward<Arguments>(arguments)...);
  }
};

// Returns a function of torch's that is called with the device of its arguments current: sparse
// tensors are made on the current device.
template <auto kFunction>
auto on_device() {
  return &OnDevice<kFunction>::call;
}

// A sparse tensor is made of strided tensors, and torch's own functions for these operators ask
// nothing of the device.
void register_coordinates() {
  constexpr auto kKey = c10::DispatchKey::SparsePrivateUse1;
  auto& aten = library("aten", kKey, __LINE__);
  aten.impl("_sparse_coo_tensor_with_dims", on_device<at::native::new_with_dims_sparse>());
  aten.impl("_sparse_coo_tensor_with_dims_and_tensors",
            on_device<at::native::new_with_dims_and_tensor_sparse_symint>());
  aten.impl("empty.memory_format", on_device<at::native::empty_sparse>());
  aten.impl("empty_like", on_device<at::native::empty_like_sparse_coo>());
  aten.impl("clone", on_device<at::native::clone_sparse>());
  aten.impl("copy_", on_device<at::native::copy_sparse_wrapper_>());
  aten.impl("copy_sparse_to_sparse_", on_device<at::native::copy_sparse_>());
  aten.impl("zero_", on_device<at::native::zero_sparse_>());
  aten.impl("_indices", on_device<at::native::_indices_sparse>());
  aten.impl("_values", on_device<at::native::_values_sparse>());
  aten.impl("indices", on_device<at::native::indices_sparse>());
  aten.impl("values", on_device<at::native::values_sparse>());
  aten.impl("_nnz", on_device<at::native::_nnz_sparse>());
  aten.impl("is_coalesced", on_device<at::native::is_coalesced_sparse>());
  aten.impl("_coalesced_", on_device<at::native::_coalesced_sparse_>());
  aten.impl("sparse_dim", on_device<at::native::sparse_dim_sparse>());
  aten.impl("dense_dim", on_device<at::native::dense_dim_sparse>());
  aten.impl("_dimI", on_device<at::native::sparse_dim_sparse>());
  aten.impl("_dimV", on_device<at::native::dense_dim_sparse>());
  aten.impl("sparse_resize_", on_device<at::native::sparse_resize_>());
  aten.impl("sparse_resize_and_clear_", on_device<at::native::sparse_resize_and_clear_>());
  aten.impl("resize_as_sparse_", on_device<at::native::resize_as_sparse_>());
  aten.impl("is_pinned", on_device<at::native::is_pinned_sparse_coo>());
  aten.impl("unsqueeze", on_device<at::native::unsqueeze_sparse>());
  aten.impl("permute", on_device<at::native::permute_sparse_coo>());
  aten.impl("view_as_real", on_device<at::native::view_as_real_sparse>());
  aten.impl("view_as_complex", on_device<at::native::view_as_complex>());
  run_others_on_host(kKey, c10::DispatchKey::SparseCPU);
}

// Rows, columns, and blocks of them.
void register_compressed() {
  constexpr auto kKey = c10::DispatchKey::SparseCsrPrivateUse1;
  auto& aten = library("aten", kKey, __LINE__);
  aten.impl("empty.memory_format", on_device<at::native::empty_sparse_compressed>());
  aten.impl("empty_like", on_device<at::native::empty_like_sparse_csr>());
  aten.impl("clone", on_device<at::native::clone_sparse_compressed>());
  aten.impl("copy_", on_device<at::native::copy_sparse_compressed_>());
  aten.impl("zero_", on_device<at::native::zero_sparse_csr_>());
  aten.impl("resize_", on_device<at::native::resize_sparse_csr_>());
  aten.impl("resize_as_sparse_", on_device<at::native::resize_as_sparse_compressed_>());
  aten.impl("crow_indices", on_device<at::native::crow_indices_sparse_csr>());
  aten.impl("col_indices", on_device<at::native::col_indices_sparse_csr>());
  aten.impl("ccol_indices", on_device<at::native::ccol_indices_sparse_csr>());
  aten.impl("row_indices", on_device<at::native::row_indices_sparse_csr>());
  aten.impl("values", on_device<at::native::values_sparse_csr>());
  aten.impl("_nnz", on_device<at::native::_nnz_sparse_csr>());
  aten.impl("sparse_dim", on_device<at::native::sparse_dim_sparse_csr>());
  aten.impl("dense_dim", on_device<at::native::dense_dim_sparse_csr>());
  aten.impl("is_pinned", on_device<at::native::is_pinned_sparse_compressed>());
  aten.impl("select.int", on_device<at::native::select_sparse_csr>());
  run_others_on_host(kKey, c10::DispatchKey::SparseCsrCPU);
}

}  // namespace

void register_sparse_operators() {
  register_coordinates();
  register_compressed();
}

}  // namespace tdcopier::sim
