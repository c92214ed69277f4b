// Looks at an example once, and at each batch for whether it is like it.
#include "python/prepared_copy.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "python/device_argument.h"
#include "python/torch_state.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// So much memory of the target may wait, four times, in tensors that nobody has any more. What is
// larger is mostly in transfers, beside which new tensors cost little.
constexpr uint64_t kMostKeptBytes = 4 * 1024 * 1024;

void write_tuple(std::ostream& out, at::IntArrayRef numbers) {
  out << '(';
  for (size_t i = 0; i < numbers.size(); ++i) out << (i == 0 ? "" : ", ") << numbers[i];
  out << (numbers.size() == 1 ? ",)" : ")");
}

// "(5, 4) of Float", with the strides where they are asked for.
std::string layout_of(const LeafTable& leaves, size_t index, bool with_strides) {
  const Leaf& leaf = leaves[index];
  std::ostringstream text;
  write_tuple(text, leaves.sizes(leaf));
  text << ' ' << c10::getDtypeNames(leaf.dtype).first;
  if (!with_strides) return text.str();
  text << " with strides ";
  if (!leaf.strided) {
    write_tuple(text, leaves.strides(leaf));
  } else {
    write_tuple(text, leaves.source_strides_bytes(leaf));
    text << " bytes";
  }
  return text.str();
}

std::string in_words(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

// The node of a leaf of a table.
size_t node_of(const TreeSpec& spec, size_t group, size_t leaf) {
  size_t node = 0;
  while (spec.node(node).kind != NodeKind::kLeaf || spec.node(node).group != group ||
         spec.node(node).number != leaf) {
    ++node;
  }
  return node;
}

bool is_on(PyObject* value, c10::Device device) {
  return THPVariable_CheckTypeExact(Py_TYPE(value)) && THPVariable_Unpack(value).device() == device;
}

}  // namespace

PreparedCopy::PreparedCopy(py::handle example, py::handle device, const CopyOptions& options,
                           bool reuse_outputs)
    : target_(parse_device(device)), options_(options) {
  const ReleaseAtEnd release_at_end;  // what the walk has kept
  const FlatTree flat = flatten(example, target_);
  const std::vector<std::string> paths = paths_of(example, target_);
  delegated_ = flat.delegated.size();
  reused_ = flat.reused;
  expected_.nodes = flat.spec.nodes();
  std::vector<size_t> leaves;
  for (const SourceGroup& group : flat.groups) {
    expected_.patterns.push_back(std::make_shared<const LeafTable>(group.leaves.without_memory()));
    plans_.push_back(
        std::make_shared<const PackPlan>(make_pack_plan(group.leaves.extents(), options_.pack)));
    leaves.push_back(group.leaves.size());
    paths_.emplace_back(group.leaves.size());
  }
  for (size_t node = 0; node < std::min(flat.spec.nodes(), paths.size()); ++node) {
    const TreeSpec::Node& leaf = flat.spec.node(node);
    if (leaf.kind == NodeKind::kLeaf) paths_[leaf.group][leaf.number] = paths[node];
  }
  if (reuse_outputs && bytes() <= kMostKeptBytes) kept_.emplace(std::move(leaves));
}

std::unique_ptr<Handle> PreparedCopy::start_copy(py::handle data) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  return start_copy_to(target_, data, options_, this);
}

bool PreparedCopy::do_fit(const FlatTree& data) const {
  return data.groups.size() == expected_.patterns.size() &&
         std::all_of(data.groups.begin(), data.groups.end(),
                     [](const SourceGroup& group) { return group.leaves.equals_pattern(); });
}

bool PreparedCopy::note_fit(const FlatTree& data) {
  const bool fit = do_fit(data);
  ++(fit ? fits_ : misfits_);
  return fit;
}

void PreparedCopy::offer_outputs(Handle& handle) {
  if (kept_) handle.reuse_outputs(py::cast(this, py::return_value_policy::reference), *kept_);
}

std::optional<std::string> PreparedCopy::why_not(py::handle data) const {
  const ReleaseAtEnd release_at_end;
  const FlatTree flat = flatten(data, target_, expected_);
  if (do_fit(flat)) return std::nullopt;
  if (torch_is_altered()) {
    return "a torch mode or transform is active: every leaf is left to its own .to";
  }
  const auto path = [&](size_t node) {
    return path_of(data, node, target_).value_or("a leaf of data");
  };
  if (flat.delegated.size() > delegated_) {
    return path(flat.delegated.front().node) + " is left to its own .to, as " +
           in_words(flat.delegated.size(), "leaf or container") + " in all; the example had " +
           std::to_string(delegated_);
  }
  if (flat.reused > reused_) {
    for (size_t node = 0; node < flat.spec.nodes(); ++node) {
      const TreeSpec::Node& ready = flat.spec.node(node);
      if (ready.kind != NodeKind::kReady || !is_on(flat.spec.value(ready.number), target_))
        continue;
      return path(node) + " is on " + target_.str() + " already, as " +
             in_words(flat.reused, "tensor") + " in all; the example had " +
             std::to_string(reused_);
    }
  }
  for (size_t group = 0; group < std::min(flat.groups.size(), expected_.patterns.size()); ++group) {
    const LeafTable& found = flat.groups[group].leaves;
    const LeafTable& wanted = *expected_.patterns[group];
    const size_t common = found.device() == wanted.device() ? found.common_with(wanted) : 0;
    if (common == found.size() && common == wanted.size()) continue;
    if (common == found.size()) {
      return "data has no leaf that is like " + paths_[group][common] + " of the example, " +
             layout_of(wanted, common, /*with_strides=*/false);
    }
    const std::string where = path(node_of(flat.spec, group, common));
    if (common == wanted.size()) return where + " is a leaf more than the example had";
    if (found.device() != wanted.device()) {
      return where + " is on " + found.device().str() + ", the example's " + paths_[group][common] +
             " was on " + wanted.device().str();
    }
    const bool only_strides = found.sizes(found[common]) == wanted.sizes(wanted[common]) &&
                              found[common].dtype == wanted[common].dtype;
    const std::string& was = paths_[group][common];
    return where + " is " + layout_of(found, common, only_strides) + ", the example's " +
           (was == where ? "" : was + " ") + "was " + layout_of(wanted, common, only_strides);
  }
  if (flat.groups.size() < expected_.patterns.size()) {
    const size_t group = flat.groups.size();
    return "data has no leaf that is like " + paths_[group][0] + " of the example, " +
           layout_of(*expected_.patterns[group], 0, /*with_strides=*/false);
  }
  return "data has leaves on " + in_words(flat.groups.size(), "device") + ", the example on " +
         std::to_string(expected_.patterns.size());
}

size_t PreparedCopy::leaves() const {
  size_t leaves = 0;
  for (const auto& pattern : expected_.patterns) leaves += pattern->size();
  return leaves;
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
