// Pairs leaves with the tables whose rows they fill; the rest is a copy into memory that exists.
#include "python/start_scatter.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>
#include <vector>

#include "python/array_leaf.h"
#include "python/device_argument.h"
#include "python/pair_mistakes.h"
#include "python/pair_overlap.h"
#include "python/pair_walk.h"
#include "python/row_leaves.h"
#include "python/torch_state.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

std::string text(at::IntArrayRef sizes) {
  return py::str(py::tuple(py::cast(sizes.vec())));
}

constexpr PairNames kNames{"batch", "storage"};

class RowSorter {
 public:
  RowSorter(py::handle batch, py::handle storage, RowLeaves& rows)
      : batch_(batch),
        storage_(storage),
        rows_(rows),
        mistakes_(batch, storage, kNames),
        altered_(torch_is_altered()) {}

  SortedPairs run() {
    PairedTrees trees = pair_trees(batch_, storage_, kNames);
    leaves_ = trees.leaves.size();
    sorted_.opaque = trees.opaque;
    for (number_ = 0; number_ < leaves_; ++number_) {
      LeafPair& pair = trees.leaves[number_];
      auto from = py::reinterpret_steal<py::object>(std::exchange(pair.source, nullptr));
      auto to = py::reinterpret_steal<py::object>(std::exchange(pair.destination, nullptr));
      sort_out(std::move(from), std::move(to));
    }
    for (const DelegatedPair& pair : sorted_.delegated) {
      sorted_.readers.note(pair.source);
      sorted_.writers.note(pair.destination);
    }
    if (const auto shared = find_shared_memory(sorted_, leaves_)) {
      mistakes_.refuse_sharing(shared->first, shared->second);
    }
    return std::move(sorted_);
  }

 private:
  void sort_out(py::object from, py::object to) {
    from = as_tensor(std::move(from), "source");
    py::object table = as_tensor(to, "destination");
    const at::Tensor& rows = THPVariable_Unpack(from.ptr());
    const at::Tensor& target = THPVariable_Unpack(table.ptr());
    check(rows, target);
    if (rows.numel() == 0) {
      ++sorted_.empty;
    } else if (altered_ || !add(from, table)) {
      sorted_.delegated.push_back({std::move(from), std::move(table), number_});
    }
  }

  // The leaf, or a tensor over an array's memory.
  py::object as_tensor(py::object leaf, const char* tree) {
    if (is_array_type(Py_TYPE(leaf.ptr()))) {
      const bool written = tree[0] == 'd';
      if (written && (!is_readable_array(leaf.ptr()) || !memory_of_array(leaf.ptr()).writeable)) {
        mistakes_.refuse(number_, tree,
                         " is an array that torch cannot write to: it is read-only, or of another "
                         "byte order");
      }
      py::object tensor = tensor_from_array(leaf.ptr());
      if (!written) return tensor;
      const at::Tensor& made = THPVariable_Unpack(tensor.ptr());
      if (made.numel() != 0 && made.const_data_ptr() != memory_of_array(leaf.ptr()).data) {
        mistakes_.refuse(number_, tree,
                         " is an array with strides that no tensor has: give a contiguous one");
      }
      return tensor;
    }
    if (!THPVariable_Check(leaf.ptr())) {
      const std::string type = Py_TYPE(leaf.ptr())->tp_name;
      mistakes_.refuse(number_, tree, " is a " + type + ": give the tensors in it");
    }
    return leaf;
  }

  void check(const at::Tensor& rows, const at::Tensor& target) {
    mistakes_.check_writable(number_, target);
    if (const std::optional<std::string> mistake = rows_.mistake_in(target)) {
      mistakes_.refuse(number_, "destination", *mistake);
    }
    const RowIndex& index = *rows_.index();
    std::vector<int64_t> wanted = index.sizes;
    const at::IntArrayRef row = target.sizes().slice(index.lead);
    wanted.insert(wanted.end(), row.begin(), row.end());
    if (rows.sizes() != at::IntArrayRef(wanted)) {
      mistakes_.refuse(number_, "source",
                       " has shape " + text(rows.sizes()) + ", and the rows that it is for have " +
                           text(wanted) + " together");
    }
    if (rows.scalar_type() != target.scalar_type()) {
      mistakes_.refuse_dtypes(number_, rows.scalar_type(), target.scalar_type());
    }
  }

  // False: it is left to torch.
  bool add(const py::object& from, const py::object& to) {
    const at::Tensor& rows = THPVariable_Unpack(from.ptr());
    const at::Tensor& target = THPVariable_Unpack(to.ptr());
    const c10::Device device = rows.device();
    if (!target.device().is_cpu() || !(device.is_cpu() || has_engine_transfers(device))) {
      return false;
    }
    const PlainTensor plain = look_at(rows, plain_tensor_keys(device));
    const PlainTensor plain_target = look_at(target, plain_tensor_keys(c10::kCPU));
    mistakes_.check_storage(number_, plain, rows, "source");
    mistakes_.check_storage(number_, plain_target, target, "destination");
    if (plain.packable != Packable::kYes || plain_target.packable != Packable::kYes) return false;
    const std::optional<RowTable> table = look_at_rows(target, rows_.index()->lead);
    if (!table || !rows.is_contiguous()) return false;
    IntoGroup& group = group_of(device);
    const auto* data = static_cast<const std::byte*>(plain.storage->data()) + plain.begin;
    group.pairs.leaves.add_bytes(data, rows.scalar_type(),
                                 static_cast<uint64_t>(rows.numel()) * rows.itemsize(),
                                 static_cast<uint32_t>(rows.itemsize()));
    auto* const to_data =
        static_cast<std::byte*>(plain_target.storage->mutable_data()) + plain_target.begin;
    group.pairs.destinations.add_rows(to_data, plain_target.storage, *table, rows_.index());
    sorted_.written.push_back(target.unsafeGetTensorImpl());
    group.keep(number_, from, to);
    return true;
  }

  IntoGroup& group_of(c10::Device from) {
    for (IntoGroup& group : sorted_.groups) {
      if (group.pairs.leaves.device() == from) return group;
    }
    sorted_.groups.push_back({c10::Device(c10::kCPU),
                              {LeafTable(from), {}},
                              std::make_shared<PySources>(),
                              std::make_shared<PySources>(),
                              {},
                              {}});
    return sorted_.groups.back();
  }

  const py::handle batch_;
  const py::handle storage_;
  RowLeaves& rows_;
  const PairMistakes mistakes_;
  const bool altered_;
  size_t leaves_ = 0;
  size_t number_ = 0;  // of the pair in hand
  SortedPairs sorted_;
};

}  // namespace

std::unique_ptr<Handle> start_scatter(py::handle batch, py::handle storage, RowNumbers numbers,
                                      py::object fill, const IntoOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  PairsToFill work{{}, {}, std::move(fill), "start_scatter()"};
  {
    const PhaseRange range(work.phases, Phase::kFlatten);
    RowLeaves rows(request_of(std::move(numbers)));
    work.pairs = RowSorter(batch, storage, rows).run();
    const auto twice = rows.index() ? repeated_row(rows.index()->rows) : std::nullopt;
    if (twice) {
      throw py::value_error("row " + rows.named(*twice) +
                            " is in the index more than once: which of its values would stay?");
    }
  }
  return fill_pairs(batch, storage, work, options);
}

}  // namespace tdcopier
