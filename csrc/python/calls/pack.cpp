// The steps of pack(): walk, values for pickle, plan, layout, and a copy into the body.
#include "python/calls/pack.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/Device.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/internal_error.h"
#include "engine/channels/message_pool.h"
#include "engine/device/accelerator.h"
#include "engine/device/graph_capture.h"
#include "engine/device/pinned_ranges.h"
#include "engine/jobs/route.h"
#include "engine/leaves/destination.h"
#include "engine/leaves/part_storage.h"
#include "engine/leaves/result.h"
#include "engine/moves/gather_scatter.h"
#include "python/calls/start_copy.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/hooks.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/buffer_memory.h"
#include "python/walk/flatten.h"
#include "python/walk/known_trees.h"
#include "python/walk/sources.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

constexpr uintptr_t kOutAddressBytes = 16;  // enough for any parcel

std::string path_in_parcel(py::handle data, size_t node) {
  return path_of(data, node, std::nullopt).value_or("a value of data");
}

[[noreturn]] void refuse_unreadable(py::handle data, size_t node, c10::Device device) {
  throw py::type_error(path_in_parcel(data, node) + " cannot be packed: it is on " + device.str() +
                       ", and parcels are on the host or a device that tdcopier copies from");
}

[[noreturn]] void refuse_device(py::handle data, size_t node, c10::Device its, c10::Device others) {
  throw py::type_error(path_in_parcel(data, node) + " is on " + its.str() +
                       ", and other leaves are on " + others.str() +
                       ": a parcel is on one device. Copy the tree to one first");
}

// Returns the leaves of the tree. Throws if they are on several devices, or of a dtype that torch
// has got since.
SourceGroup only_group(FlatTree& flat, py::handle data) {
  std::optional<c10::Device> first;
  if (!flat.groups.empty()) first = flat.groups.front().leaves.device();
  for (const Delegated& leaf : flat.delegated) {
    PyObject* const value = flat.spec.value(leaf.value);
    if (!is_tensor(value)) continue;
    const c10::Device its = tensor_in(value).device();
    if (!its.is_cpu() && !has_engine_transfers(its)) refuse_unreadable(data, leaf.node, its);
    if (!first) first = its;
    if (its != *first) refuse_device(data, leaf.node, its, *first);
  }
  const c10::Device device = first.value_or(c10::Device(c10::kCPU));
  if (flat.groups.empty()) return {LeafTable(device), std::make_shared<PySources>(), {}};
  for (size_t node = 0; node < flat.spec.nodes(); ++node) {
    const TreeSpec::Node& it = flat.spec.node(node);
    if (it.kind != NodeKind::kLeaf) continue;
    const LeafTable& leaves = flat.groups[it.group].leaves;
    if (leaves.device() != device) refuse_device(data, node, leaves.device(), device);
    if (!can_be_packed(leaves[it.number].dtype)) {
      throw py::type_error(path_in_parcel(data, node) + " cannot be packed: parcels have no " +
                           std::string(c10::toString(leaves[it.number].dtype)));
    }
  }
  return std::move(flat.groups.front());
}

// A pickle has the gradient that a tensor needs, but not the one that it carries forward.
void refuse_forward_gradients(const FlatTree& flat, py::handle data) {
  for (const Delegated& leaf : flat.delegated) {
    if (leaf.packable != Packable::kGradient) continue;
    const at::Tensor& tensor = tensor_in(flat.spec.value(leaf.value));
    if (!tensor._fw_grad(0).defined()) continue;
    throw py::type_error(path_in_parcel(data, leaf.node) +
                         " cannot be packed: it carries a forward gradient");
  }
}

// Calls `run`, whose foreign code may give leaves new memory before theirs has been read, and
// refuses that.
template <typename Run>
auto run_beside_leaves(SourceGroup& group, const Run& run) {
  group.sources->keep_memory_of_tensors();
  const std::vector<std::span<const std::byte>> before = group.sources->memory();
  auto result = run();
  const auto is_same = [](const auto& a, const auto& b) {
    return a.data() == b.data() && a.size() == b.size();
  };
  if (!std::ranges::equal(before, group.sources->memory(), is_same)) {
    throw std::runtime_error("the code of a class or of `out` has resized memory of the tree");
  }
  return result;
}

// Pickles the values that only pickle can write, and adds the memory of their tensors to the
// leaves. Returns the pickle.
std::string dump_values(const WrittenTree& tree, SourceGroup& group, py::handle data) {
  if (tree.values.empty()) return {};
  const c10::Device device = group.leaves.device();
  const auto device_object = py::reinterpret_steal<py::object>(THPDevice_New(device));
  const py::cpp_function name(
      [&](size_t value) { return path_in_parcel(data, tree.nodes[value]); });
  const py::tuple dumped = run_beside_leaves(
      group, [&] { return hooks().dump_values(tree.values, name, device_object); });
  for (const py::handle each : py::list(dumped[1])) {
    const at::Tensor& memory = tensor_in(each.ptr());
    const bool is_plain = memory.scalar_type() == c10::kByte && memory.dim() == 1 &&
                          memory.is_contiguous() && memory.device() == device;
    check_invariant(is_plain && group.leaves.add_if_packable(memory) == Packable::kYes,
                    "memory of pickled values is in plain tensors");
    group.sources->keep(Py_NewRef(each.ptr()));
  }
  return dumped[0].cast<std::string>();
}

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
}

// Returns the memory of a uint8 tensor.
c10::Storage memory_of_tensor(py::handle tensor) {
  const at::Tensor& bytes = tensor_in(tensor.ptr());
  const PlainTensor plain = look_at(bytes, plain_tensor_keys(bytes.device()));
  if (plain.packable == Packable::kShortStorage) {
    throw py::value_error("the tensor" + why_out_of_reach(bytes));
  }
  if (plain.packable != Packable::kYes || bytes.scalar_type() != c10::kByte || bytes.dim() != 1 ||
      !bytes.is_contiguous()) {
    throw py::type_error("the bytes of a parcel are a contiguous uint8 tensor of one dimension");
  }
  return part_of_memory(bytes.storage(), plain.begin, static_cast<uint64_t>(bytes.numel()));
}

// Returns the memory of a tensor on the host, or of an object with the buffer protocol. An array of
// the tensor keeps it from being resized.
BufferMemory memory_on_host(py::handle object) {
  if (!is_tensor(object.ptr())) return memory_of_buffer(object);
  return memory_of_buffer(object.attr("detach")().attr("numpy")());
}

// Returns memory of an object; if that is a tensor that torch has pinned, as the tensor's own, so
// that torch knows which streams read it.
c10::Storage known_to_torch(py::handle object, const c10::Storage& memory) {
  if (!is_tensor(object.ptr())) return memory;
  const c10::Storage& whole = tensor_in(object.ptr()).storage();
  if (memory.nbytes() == 0 || whole.allocator() == nullptr) return memory;
  if (!is_pinned_for_driver(whole.data())) return memory;
  const auto begin = static_cast<uint64_t>(static_cast<const std::byte*>(memory.data()) -
                                           static_cast<const std::byte*>(whole.data()));
  c10::Storage part = PartStorage::make(whole, begin, memory.nbytes());
  part.unsafeGetStorageImpl()->set_resizable(false);
  return part;
}

// Returns the memory that the caller has given for the parcel.
c10::Storage memory_given(py::handle out, c10::Device device, uint64_t bytes,
                          const LeafTable& leaves) {
  c10::Storage memory;
  if (device.is_cpu()) {
    const BufferMemory given = memory_on_host(out);
    if (given.is_read_only) throw py::value_error("out is read-only");
    memory = given.storage;
  } else {
    if (!is_tensor(out.ptr()) || tensor_in(out.ptr()).device() != device) {
      throw py::type_error("out must be a tensor on " + device.str() + ", where the tree is");
    }
    memory = memory_of_tensor(out);
  }
  if (memory.nbytes() < bytes) {
    throw py::value_error("out has " + std::to_string(memory.nbytes()) +
                          " bytes, and the parcel needs " + std::to_string(bytes));
  }
  memory = part_of_memory(memory, 0, bytes);
  if (device.is_cpu()) memory = known_to_torch(out, memory);
  const std::span<const std::byte> all(static_cast<const std::byte*>(memory.data()), bytes);
  if (reinterpret_cast<uintptr_t>(all.data()) % kOutAddressBytes != 0) {
    throw py::value_error("out must begin at a multiple of 16 bytes");
  }
  for (const Leaf& leaf : leaves.all()) {
    if (leaf.bytes != 0 && overlap(all, leaves.reach(leaf))) {
      throw py::value_error("out overlaps a leaf of the tree");
    }
  }
  return memory;
}

// Returns the memory that `out` gives for these bytes, or new memory.
c10::Storage memory_from(py::handle out, uint64_t bytes, SourceGroup& group) {
  const c10::Device device = group.leaves.device();
  if (py::isinstance<MessagePool>(out)) {
    if (device.is_cpu()) return part_of_memory(out.cast<MessagePool&>().take(bytes), 0, bytes);
  } else if (!out.is_none()) {
    const auto of_device = py::reinterpret_steal<py::object>(THPDevice_New(device));
    const py::object given = run_beside_leaves(group, [&] { return out(bytes, of_device); });
    if (!given.is_none()) return memory_given(given, device, bytes, group.leaves);
  }
  return device.is_cpu() ? new_host_memory(bytes) : allocate_on_device(device, bytes);
}

// Returns host memory for the head of a parcel on a device. It is pinned, so that the copy from it
// does not wait for the kernels of the current stream, unless no more memory can be pinned.
c10::Storage memory_for_head(c10::Device device, uint64_t bytes) {
  c10::Allocator* const pinned = at::getHostAllocator(device.type());
  try {
    return {c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), pinned->allocate(bytes),
            pinned, /*resizable=*/false};
  } catch (const c10::Error& error) {
    if (!is_lack_of_memory(error)) throw;
  }
  return new_host_memory(bytes);
}

// Calls visit(begin, end) for the bytes of the body before each leaf that no other leaf has.
template <typename Visit>
void visit_gaps(const LeafTable& leaves, const PackPlan& plan, const Visit& visit) {
  uint64_t end = 0;
  for (const ChunkPlan& chunk : plan.chunks) {
    for (uint32_t i = chunk.first; i < chunk.last; ++i) {
      const uint64_t begin = chunk.begin + plan.slots[plan.order[i]].offset;
      if (begin > end) visit(end, begin);
      end = begin + leaves[plan.order[i]].bytes;
    }
  }
}

// Clears the gaps of a body on a device, where few large writes are faster than many small ones:
// between two large leaves it clears what is between the first gap and the last, with the leaves
// there, which are written later.
void clear_gaps_on_device(const at::Tensor& body, const at::Tensor& zero, const LeafTable& leaves,
                          const PackPlan& plan) {
  std::optional<std::pair<uint64_t, uint64_t>> all;
  const auto clear = [&] {
    if (!all) return;
    const auto size = static_cast<int64_t>(all->second - all->first);
    body.narrow(0, static_cast<int64_t>(all->first), size)
        .copy_(zero.expand({size}), /*non_blocking=*/true);
    all.reset();
  };
  visit_gaps(leaves, plan, [&](uint64_t begin, uint64_t end) {
    if (all && begin - all->second > kMaxPackedLeafBytes) clear();
    all = {all ? all->first : begin, end};
  });
  clear();
}

// Writes the head, and clears what the leaves leave free: parcels of equal trees have equal bytes,
// and none of another use of the memory. The host waits for no work on a device.
void write_around_leaves(const c10::Storage& bytes, std::span<const std::byte> head,
                         const LeafTable& leaves, const PackPlan& plan) {
  const auto head_bytes = static_cast<int64_t>(head.size());
  if (bytes.device().is_cpu()) {
    auto* const first = static_cast<std::byte*>(bytes.mutable_data());
    std::ranges::copy(head, first);
    return visit_gaps(leaves, plan, [&](uint64_t begin, uint64_t end) {
      std::memset(first + head_bytes + begin, 0, end - begin);
    });
  }
  const c10::Storage on_host = memory_for_head(bytes.device(), head.size());
  std::ranges::copy(head, static_cast<std::byte*>(on_host.mutable_data()));
  const at::Tensor all = tensor_over(bytes);
  all.narrow(0, 0, head_bytes).copy_(tensor_over(on_host), /*non_blocking=*/true);
  const at::Tensor body = all.narrow(0, head_bytes, all.numel() - head_bytes);
  clear_gaps_on_device(body, all.narrow(0, kZeroByteOfHead, 1), leaves, plan);
}

// Copies the leaves of the host into the body.
void copy_leaves_on_host(SourceGroup&& group, std::shared_ptr<const PackPlan> plan,
                         const c10::Storage& bytes, uint64_t body_begin) {
  const c10::Device host(c10::kCPU);
  LeafGroup leaves{host,
                   {std::make_shared<const LeafTable>(std::move(group.leaves)), std::move(plan),
                    std::move(group.sources)},
                   group.mapped};
  leaves.image = bytes;
  leaves.image_begin = body_begin;
  CopyOptions options;
  options.use_pinned_staging = false;
  TreeSpec nothing;
  nothing.add(NodeKind::kReady, 0);
  nothing.set_ready(0, Py_NewRef(Py_None));
  Handle handle(host, std::move(nothing), {});
  start_group(handle, std::move(leaves), options);
  handle.wait(py::none());
}

// Copies the leaves of a device into the body on its current stream, as torch's own calls would.
void copy_leaves_on_device(const LeafTable& leaves, const PackPlan& plan, const c10::Storage& bytes,
                           uint64_t body_begin, const c10::Stream& stream) {
  auto* const body = static_cast<std::byte*>(bytes.mutable_data()) + body_begin;
  DestinationTable places;
  places.reserve(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    places.add(body + plan.begin_of(i), nullptr, /*pinned=*/false);
  }
  const WithoutGil no_gil;
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
  const c10::StreamGuard on_stream(stream);  // and on its device
  copy_within(stream, leaves, places);
}

// Returns what precedes the leaves. Adds the memory of pickled values to them.
std::shared_ptr<const ParcelHead> head_of(py::handle data, const FlatTree& flat,
                                          SourceGroup& group) {
  KnownTrees& known_trees = KnownTrees::get();
  if (std::shared_ptr<const ParcelHead> known = known_trees.find(flat.spec, group.leaves)) {
    return known;
  }
  const WrittenTree tree = write_tree(flat.spec, group.leaves);
  const size_t tree_leaves = group.leaves.size();
  const std::string pickled = dump_values(tree, group, data);
  ByteWriter layout;
  write_layout(tree, pickled, group.leaves.all().subspan(tree_leaves), layout);
  auto made = std::make_shared<ParcelHead>();
  made->plan = std::make_shared<const PackPlan>(parcel_plan(group.leaves));
  ByteWriter head;
  write_head(head, layout.written(), made->body_bytes());
  made->bytes.assign(head.written().begin(), head.written().end());
  made->layout = read_layout(layout.written(), made->body_bytes(), /*may_import=*/true);
  if (tree.values.empty()) known_trees.keep(flat.spec, group.leaves, made);
  return made;
}

// A parcel without its leaves.
struct Written {
  std::unique_ptr<Parcel> parcel;
  SourceGroup group;
  std::shared_ptr<const PackPlan> plan;
  uint64_t body_begin;
};

Written write_all_but_leaves(py::handle data, const FlatTree& flat, SourceGroup group,
                             py::handle out) {
  refuse_forward_gradients(flat, data);
  const std::shared_ptr<const ParcelHead> head = head_of(data, flat, group);
  const uint64_t total = head->bytes.size() + head->body_bytes();
  const c10::Storage bytes = memory_from(out, total, group);
  write_around_leaves(bytes, head->bytes, group.leaves, *head->plan);
  auto parcel = std::make_unique<Parcel>(head->layout, bytes, head->bytes.size(),
                                         ParcelTraits{.may_unpickle = true});
  if (!bytes.device().is_cpu()) parcel->keep_head(head->bytes);
  return {std::move(parcel), std::move(group), head->plan, head->bytes.size()};
}

}  // namespace

std::unique_ptr<Parcel> pack(py::handle data, py::handle out) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  FlatTree flat = flatten_for_parcel(data);
  SourceGroup group = only_group(flat, data);
  const c10::Device device = group.leaves.device();
  if (!device.is_cpu()) refuse_capture(parse_stream(py::none(), device));
  const RelaxedCapture relaxed(device.type());  // of another thread
  Written written = write_all_but_leaves(data, flat, std::move(group), out);
  if (written.group.leaves.size() != 0) {
    const c10::Storage& bytes = written.parcel->bytes();
    if (device.is_cpu()) {
      copy_leaves_on_host(std::move(written.group), written.plan, bytes, written.body_begin);
    } else {
      copy_leaves_on_device(written.group.leaves, *written.plan, bytes, written.body_begin,
                            parse_stream(py::none(), device));
    }
  }
  return std::move(written.parcel);
}

Reserved reserve(py::handle data, py::handle out) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  FlatTree flat = flatten_for_parcel(data);
  SourceGroup group = only_group(flat, data);
  if (!group.leaves.device().is_cpu()) return {};
  Written written = write_all_but_leaves(data, flat, std::move(group), out);
  Reserved made{std::move(written.parcel), {}};
  for (size_t i = 0; i < written.group.leaves.size(); ++i) {
    const Leaf& leaf = written.group.leaves[i];
    if (leaf.bytes == 0) continue;
    made.places.emplace_back(reinterpret_cast<uintptr_t>(leaf.data),
                             written.body_begin + written.plan->begin_of(i));
  }
  return made;
}

std::unique_ptr<Parcel> parcel_from(py::handle bytes, bool may_unpickle, bool is_mapped,
                                    bool is_owned, std::string_view head) {
  release_returned_sources();
  if (is_tensor(bytes.ptr()) && !tensor_in(bytes.ptr()).is_cpu()) {
    return Parcel::read(memory_of_tensor(bytes),
                        {.may_unpickle = may_unpickle, .is_owned = is_owned},
                        std::as_bytes(std::span(head)));
  }
  BufferMemory found = memory_on_host(bytes);
  found.storage = known_to_torch(bytes, found.storage);
  std::unique_ptr<Parcel> made =
      Parcel::read(found.storage, {.may_unpickle = may_unpickle,
                                   .is_read_only = found.is_read_only && !is_owned,
                                   .is_mapped = is_mapped});
  const auto address = reinterpret_cast<uintptr_t>(found.storage.data());
  if (address % made->layout().address_bytes == 0) return made;
  const c10::Storage copy = new_host_memory(found.storage.nbytes());
  std::memcpy(copy.mutable_data(), found.storage.data(), copy.nbytes());
  return Parcel::read(copy, {.may_unpickle = may_unpickle});
}

}  // namespace tdcopier
