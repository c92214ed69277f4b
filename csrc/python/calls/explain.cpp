// Runs the walk and finds the routes of a copy, and reads their decisions.
#include "python/calls/explain.h"

#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/internal_error.h"
#include "engine/jobs/route.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/flatten.h"
#include "python/walk/sources.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// The leaves of one device, and how a copy would move them.
struct RoutedGroup {
  LeafGroup group;
  Route route;
  size_t first_chunk;  // of all chunks of the copy
};

Reason why_not_plain(Packable packable, const at::Tensor& tensor) {
  switch (packable) {
    case Packable::kOtherKeys:
      return Reason::kOtherKeys;
    case Packable::kNamed:
      return Reason::kNamed;
    case Packable::kNoStorage:
      return Reason::kNoStorage;
    case Packable::kGradient:
      return tensor.requires_grad() && c10::GradMode::is_enabled() ? Reason::kGradient
                                                                   : Reason::kForwardGradient;
    case Packable::kTooLarge:
      return Reason::kTooLarge;
    case Packable::kUnaligned:
      return Reason::kUnaligned;
    default:
      throw InternalError("a leaf is delegated for a reason");
  }
}

Reason why(const Delegated& leaf, PyObject* value) {
  switch (leaf.why) {
    case WhyDelegated::kClass:
      return Reason::kClass;
    case WhyDelegated::kObject:
      return Reason::kObject;
    case WhyDelegated::kTorchMode:
      return Reason::kTorchMode;
    case WhyDelegated::kDevice:
      return Reason::kDevice;
    case WhyDelegated::kNotPlain:
      return why_not_plain(leaf.packable, tensor_in(value));
  }
  Py_UNREACHABLE();
}

Reason why_alone(const LeafExtent& leaf, const PackOptions& options) {
  if (!options.pack) return Reason::kPackingIsOff;
  return leaf.bytes > kMaxPackedLeafBytes ? Reason::kLarge : Reason::kLargerThanChunk;
}

class Explainer {
 public:
  Explainer(c10::Device target, const CopyOptions& options) : target_(target), options_(options) {}

  void add_group(SourceGroup&& sources) {
    LeafGroup group = group_for(target_, std::move(sources), options_);
    make_plan(group, options_);
    Route route = find_route(group, options_);
    const TransferCounts counts = transfers_of(route, group);
    transfers_ += counts.transfers;
    bytes_ += counts.bytes;
    const size_t first_chunk = chunks_;
    chunks_ += group.work.plan->chunks.size();
    groups_.push_back({std::move(group), std::move(route), first_chunk});
  }

  py::tuple leaf(const std::string& path, PyObject* value, const TreeSpec::Node& node) const {
    const auto& [group, route, first_chunk] = groups_[node.group];
    const Slot& slot = group.work.plan->slots[node.number];
    const bool packed = group.work.plan->chunks[slot.chunk].packed;
    const LeafExtent& extent = group.work.leaves->extents()[node.number];
    const bool by_kernel = route.job == JobKind::kRows;
    const bool is_straight = std::ranges::binary_search(route.straight, slot.chunk);
    const bool in_place = by_kernel || (is_straight && extent.bytes != 0);
    const Reason packing = by_kernel ? Reason::kPackedByKernel : Reason::kPacked;
    return py::make_tuple(
        path, py::handle(value), packed ? packing : why_alone(extent, options_.pack),
        std::vector<std::string>(), first_chunk + slot.chunk, slot.offset, in_place);
  }

  py::tuple totals() const { return py::make_tuple(chunks_, transfers_, bytes_); }

 private:
  const c10::Device target_;
  const CopyOptions& options_;
  std::vector<RoutedGroup> groups_;
  size_t chunks_ = 0;
  uint64_t transfers_ = 0;
  uint64_t bytes_ = 0;
};

py::tuple without_chunk(const std::string& path, PyObject* value, Reason reason,
                        const std::vector<std::string>& keys = {}) {
  return py::make_tuple(path, py::handle(value), reason, keys, py::none(), py::none(), false);
}

py::tuple delegated_row(const std::string& path, PyObject* value, const Delegated& leaf,
                        PyObject* moved) {
  const Reason reason = why(leaf, moved);
  if (reason != Reason::kOtherKeys) return without_chunk(path, value, reason);
  const at::Tensor& tensor = tensor_in(moved);
  return without_chunk(path, value, reason, other_keys(tensor, plain_tensor_keys(tensor.device())));
}

}  // namespace

py::tuple explain(py::handle data, py::handle device, const CopyOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  const c10::Device target = parse_device(device);
  FlatTree flat = flatten(data, target);
  const NamedTree named = flatten_with_paths(data, target);
  if (named.tree.spec.nodes() != flat.spec.nodes()) {
    throw std::runtime_error("data changed while it was being explained");
  }
  Explainer explainer(target, options);
  for (SourceGroup& group : flat.groups) explainer.add_group(std::move(group));
  std::vector<const Delegated*> delegated(flat.spec.nodes(), nullptr);
  for (const Delegated& leaf : flat.delegated) delegated[leaf.node] = &leaf;

  py::list rows;
  for (size_t i = 0; i < flat.spec.nodes(); ++i) {
    const TreeSpec::Node& node = flat.spec.node(i);
    const TreeSpec::Node& its = named.tree.spec.node(i);
    if (its.kind != NodeKind::kReady) continue;
    PyObject* const value = named.tree.spec.value(its.number);
    const std::string& path = named.paths[i];
    if (node.kind == NodeKind::kLeaf) {
      rows.append(explainer.leaf(path, value, node));
    } else if (node.kind != NodeKind::kReady) {
      throw std::runtime_error("data changed while it was being explained");
    } else if (delegated[i] != nullptr) {
      PyObject* const moved = flat.spec.value(node.number);
      rows.append(delegated_row(path, value, *delegated[i], moved));
    } else {
      const bool is_reused = is_tensor(flat.spec.value(node.number));
      rows.append(without_chunk(path, value, is_reused ? Reason::kReused : Reason::kOpaque));
    }
  }
  return py::make_tuple(py::reinterpret_steal<py::object>(THPDevice_New(target)), rows,
                        explainer.totals());
}

}  // namespace tdcopier
