// Checks row numbers when the first table is seen, before any row is read.
#include "python/row_leaves.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/internal_error.h"
#include "python/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

std::string joined(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

RowIndex index_of(py::handle numbers, size_t lead) {
  check_invariant(is_tensor(numbers.ptr()), "rows are numbered by a tensor");
  const at::Tensor& tensor = tensor_in(numbers.ptr());
  check_invariant(tensor.scalar_type() == at::kLong && tensor.device().is_cpu() &&
                      tensor.is_contiguous() && lead >= 1,
                  "rows are numbered by int64 that lie together on the host");
  const auto* first = static_cast<const int64_t*>(tensor.const_data_ptr());
  return {{first, first + tensor.numel()}, tensor.sizes().vec(), lead};
}

}  // namespace

RowRequest row_request_of(py::handle rows) {
  RowRequest request;
  request.index = index_of(rows.attr("numbers"), rows.attr("lead").cast<size_t>());
  request.counted = rows.attr("counted").cast<bool>();
  request.lead = rows.attr("sizes").cast<std::vector<int64_t>>();
  request.adjoining = rows.attr("is_view").cast<bool>();
  return request;
}

RowLeaves::RowLeaves(RowRequest request) : request_(std::move(request)) {
  if (!request_.lead.empty()) count_rows();
}

void RowLeaves::count_rows() {
  if (!request_.counted) {
    const int64_t size = request_.lead.front();
    const std::optional<int64_t> wrong = wrap_rows(request_.index.rows, size);
    if (wrong) {
      throw py::index_error("index " + std::to_string(*wrong) + " is out of bounds: there are " +
                            std::to_string(size) + " rows");
    }
  }
  index_ = std::make_shared<const RowIndex>(std::move(request_.index));
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

Packable RowLeaves::add(LeafTable& leaves, const at::Tensor& table) {
  return leaves.add_rows_if_packable(table, index_, request_.adjoining);
}

void RowLeaves::note_mapped(SourceGroup& group) const {
  const LeafTable& leaves = group.leaves;
  const Leaf& leaf = leaves[leaves.size() - 1];
  const RowLayout layout = leaves.row_layout(leaf);
  const auto* table = static_cast<const std::byte*>(leaf.data);
  const size_t count = index_->rows.size();
  if (leaf.bytes == 0 || count == 0) return;
  for (const size_t i : std::array{size_t{0}, count / 2, count - 1}) {
    group.mapped.note({table + index_->rows[i] * layout.stride_bytes, layout.row_bytes});
  }
}

py::object RowLeaves::read(PyObject* leaf) {
  ++left_;
  return request_.read(py::handle(leaf));
}

}  // namespace tdcopier
