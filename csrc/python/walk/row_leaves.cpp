// Checks row numbers when the first table is seen, before any row is read.
#include "python/walk/row_leaves.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/internal_error.h"
#include "engine/device/bad_rows.h"
#include "engine/moves/row_kernel.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

std::string joined(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

// Reads no numbers yet.
RowIndex index_of(const at::Tensor& tensor, size_t lead) {
  check_invariant(tensor.is_contiguous() && lead >= 1, "the tensor of row numbers is contiguous");
  RowIndex index{{}, tensor.sizes().vec(), lead};
  if (tensor.device().is_cpu()) {
    check_invariant(tensor.scalar_type() == at::kLong, "rows are numbered by int64 on the host");
  } else {
    index.on_device =
        NumbersOnDevice{tensor.const_data_ptr(), static_cast<uint32_t>(tensor.element_size()),
                        static_cast<size_t>(tensor.numel())};
  }
  return index;
}

}  // namespace

RowRequest row_request_of(py::handle rows) {
  // By place, in the order of the fields there: names would take longer than the walk of a table.
  const auto field = [&](Py_ssize_t i) { return py::handle(PyTuple_GetItem(rows.ptr(), i)); };
  check_invariant(PyTuple_Check(rows.ptr()) && PyTuple_GET_SIZE(rows.ptr()) == 6,
                  "an index of rows has six fields");
  RowRequest request;
  request.numbers = py::reinterpret_borrow<py::object>(field(0));
  check_invariant(is_tensor(request.numbers.ptr()), "rows are numbered by a tensor");
  request.index = index_of(tensor_in(request.numbers.ptr()), field(1).cast<size_t>());
  request.counted = field(2).cast<bool>();
  request.lead = field(3).cast<std::vector<int64_t>>();
  request.adjoining = field(5).cast<bool>();
  return request;
}

void add_readers(RowRequest& request, py::handle readers) {
  const auto functions = py::reinterpret_borrow<py::tuple>(readers);  // by place: that is quicker
  request.read = functions[0];
  request.flatten = functions[1];
  request.unflatten = functions[2];
}

c10::Device RowRequest::numbers_device() const {
  return tensor_in(numbers.ptr()).device();
}

RowLeaves::RowLeaves(RowRequest request) : request_(std::move(request)) {
  if (!request_.lead.empty()) count_rows();
}

void RowLeaves::count_rows() {
  RowIndex& index = request_.index;
  index.table_rows = c10::multiply_integers(request_.lead);
  if (!index.on_device) {
    const at::Tensor& numbers = tensor_in(request_.numbers.ptr());
    const auto* const first = static_cast<const int64_t*>(numbers.const_data_ptr());
    const std::span<const int64_t> given(first, static_cast<size_t>(numbers.numel()));
    // The numbers of a pair of indices have been checked, and count the rows of both dimensions.
    const int64_t size = request_.counted ? index.table_rows : request_.lead.front();
    index.rows.resize(given.size());
    if (const std::optional<int64_t> wrong = wrap_rows(given, size, index.rows)) {
      throw py::index_error("index " + std::to_string(*wrong) + " is out of bounds: there " +
                            counted_rows(size));
    }
  }
  index_ = std::make_shared<const RowIndex>(std::move(index));
}

std::optional<std::string> RowLeaves::mistake_in(const at::Tensor& table) {
  const size_t lead = index_ != nullptr ? index_->lead : request_.index.lead;
  const at::IntArrayRef sizes = table.sizes();
  if (sizes.size() < lead) {
    return " has " + std::to_string(sizes.size()) + " dimensions, and the index counts rows by " +
           std::to_string(lead);
  }
  const at::IntArrayRef counted = sizes.slice(0, lead);
  if (index_ == nullptr) {
    request_.lead = counted.vec();
    count_rows();
  }
  if (counted == at::IntArrayRef(request_.lead)) return std::nullopt;
  return " has " + joined(counted) + " rows, where other leaves have " + joined(request_.lead);
}

std::string RowLeaves::named(int64_t row) const {
  std::string text;
  for (size_t d = request_.lead.size(); d-- > 0;) {
    text = std::to_string(row % request_.lead[d]) + (text.empty() ? "" : ", ") + text;
    row /= request_.lead[d];
  }
  return request_.lead.size() == 1 ? text : "(" + text + ")";
}

c10::DimVector RowLeaves::shape_in(at::IntArrayRef table_sizes) const {
  c10::DimVector shape(index_->sizes.begin(), index_->sizes.end());
  shape.append(table_sizes.begin() + index_->lead, table_sizes.end());
  return shape;
}

std::string RowLeaves::needs_for_device() {
  return "that takes a table in pinned memory (see pin_memory_) with contiguous rows and no "
         "gradients, contiguous rows on that device, at most 2 GiB of them, and pinned staging";
}

InPlace RowLeaves::in_place(const at::Tensor& table, c10::Device device) {
  if (!mover_ || mover_->first != device) {
    const bool can_move = request_.may_be_in_place && index_->table_rows <= kMostTableRows &&
                          row_kernels(device) != nullptr;
    mover_ = {device, can_move};
    pinned_.emplace(device);
  }
  if (!mover_->second) return InPlace::kNo;
  if (!table.device().is_cpu() || table.layout() != c10::kStrided || !table.has_storage()) {
    return InPlace::kNo;
  }
  // Not with numbers on the host: beside pageable tables, it need not have a job of its own.
  if (table.nbytes() == 0 && are_numbers_on_device()) return InPlace::kNoBytes;
  const auto rows = static_cast<uint64_t>(std::max<int64_t>(index_->table_rows, 1));
  if (table.nbytes() / rows * index_->count() > kMostRowBytes) return InPlace::kNo;
  return pinned_->find(*table.storage().unsafeGetStorageImpl(), /*asks_driver=*/true);
}

Packable RowLeaves::add(LeafTable& leaves, const at::Tensor& table) {
  return leaves.add_rows_if_packable(table, index_, request_.adjoining);
}

void RowLeaves::note_mapped(const LeafTable& leaves, MappedLeaves& mapped) const {
  const Leaf& leaf = leaves[leaves.size() - 1];
  const RowLayout layout = leaves.row_layout(leaf);
  const auto* table = static_cast<const std::byte*>(leaf.data);
  const size_t count = index_->rows.size();
  if (leaf.bytes == 0 || count == 0) return;
  for (const size_t i : std::array{size_t{0}, count / 2, count - 1}) {
    mapped.note({table + index_->rows[i] * layout.stride_bytes, layout.row_bytes});
  }
}

py::object RowLeaves::read(PyObject* leaf) {
  ++left_;
  return request_.read(py::handle(leaf));
}

}  // namespace tdcopier
