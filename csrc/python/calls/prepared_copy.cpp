// Plans the copy of an example once, and checks each batch against it.
#include "python/calls/prepared_copy.h"

#include <c10/core/ScalarType.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "python/runtime/device_argument.h"
#include "python/runtime/torch_state.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Limit for keeping a result's tensors, of which up to four sets may be idle in the target's
// memory. For larger results transfers take most of the time, and new tensors cost little.
constexpr uint64_t kMostKeptBytes = 4 * 1024 * 1024;

bool is_on(PyObject* value, c10::Device device) {
  return is_plain_tensor_class(Py_TYPE(value)) && tensor_in(value).device() == device;
}

py::tuple as_tuple(at::IntArrayRef numbers) {
  return py::tuple(py::cast(numbers.vec()));
}

// Returns the fields of LeafLayout of tdcopier/_prepared.py.
py::tuple layout_of_leaf(const LeafTable& leaves, const Leaf& leaf) {
  const at::IntArrayRef strides =
      leaf.strided ? leaves.source_strides_bytes(leaf) : leaves.strides(leaf);
  return py::make_tuple(leaves.device().str(), c10::getDtypeNames(leaf.dtype).first,
                        as_tuple(leaves.sizes(leaf)), as_tuple(strides), leaf.strided);
}

}  // namespace

PreparedCopy::PreparedCopy(py::handle example, py::handle device, const CopyOptions& options,
                           bool reuse_outputs)
    : target_(parse_device(device)), options_(options) {
  const ReleaseAtEnd release_at_end;  // drops the references of the walk
  FlatTree flat = flatten(example, target_);
  check_unknown(flat, example, target_, options.on_unknown);
  std::vector<size_t> leaves;
  for (SourceGroup& group : flat.groups) {
    plans_.push_back(
        std::make_shared<const PackPlan>(make_pack_plan(group.leaves.extents(), options_.pack)));
    leaves.push_back(group.leaves.size());
    example_.push_back(std::move(group.leaves));
  }
  if (reuse_outputs && bytes() <= kMostKeptBytes) kept_.emplace(std::move(leaves));
}

std::unique_ptr<Handle> PreparedCopy::start_copy(py::handle data, std::optional<Sending> sending) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  CopyOptions options = options_;
  options.sending = usable(sending.value_or(Sending::kAtOnce));
  return start_copy_to(target_, data, options, this);
}

bool PreparedCopy::note_fit(const FlatTree& data) {
  const bool fits = std::ranges::equal(data.groups, example_,
                                       [](const SourceGroup& group, const LeafTable& leaves) {
                                         return group.leaves.is_like(leaves);
                                       });
  ++(fits ? fits_ : misfits_);
  return fits;
}

void PreparedCopy::offer_outputs(Handle& handle) {
  if (kept_) handle.reuse_outputs(py::cast(this, py::return_value_policy::reference), *kept_);
}

py::tuple PreparedCopy::layout_of(py::handle data) {
  const ReleaseAtEnd release_at_end;
  const FlatTree flat = flatten(data, target_);
  const std::vector<std::string> paths = flatten_with_paths(data, target_).paths;
  const auto path = [&](size_t node) {
    return py::str(node < paths.size() ? paths[node] : "a leaf of data");
  };
  py::list groups;
  for (const SourceGroup& group : flat.groups) groups.append(py::list(group.leaves.size()));
  py::list on_target;
  for (size_t i = 0; i < flat.spec.nodes(); ++i) {
    const TreeSpec::Node& node = flat.spec.node(i);
    if (node.kind == NodeKind::kLeaf) {
      const LeafTable& leaves = flat.groups[node.group].leaves;
      const py::list group = groups[node.group];
      group[node.number] = py::make_tuple(path(i), layout_of_leaf(leaves, leaves[node.number]));
    } else if (node.kind == NodeKind::kReady && is_on(flat.spec.value(node.number), target_)) {
      on_target.append(path(i));
    }
  }
  py::list delegated;
  for (const Delegated& leaf : flat.delegated) delegated.append(path(leaf.node));
  return py::make_tuple(groups, delegated, on_target, is_mode_active());
}

uint64_t PreparedCopy::bytes() const {
  uint64_t bytes = 0;
  for (const auto& plan : plans_) bytes += plan->total_bytes;
  return bytes;
}

int PreparedCopy::traverse(visitproc visit, void* arg) const {
  return kept_ ? kept_->traverse(visit, arg) : 0;
}

void PreparedCopy::clear() {
  if (kept_) kept_->clear();
}

}  // namespace tdcopier
