// The steps of pack(): walk, plan, layout, and a copy within the host into the body.
#include "python/calls/pack.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/jobs/route.h"
#include "python/runtime/interrupts.h"
#include "python/walk/flatten.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Clears the bytes between the leaves: parcels of equal trees have equal bytes, and none of another
// use of the memory.
void clear_gaps(const LeafTable& leaves, const PackPlan& plan, std::byte* body) {
  uint64_t end = 0;
  for (const ChunkPlan& chunk : plan.chunks) {
    for (uint32_t i = chunk.first; i < chunk.last; ++i) {
      const uint64_t begin = chunk.begin + plan.slots[plan.order[i]].offset;
      if (begin > end) std::memset(body + end, 0, begin - end);
      end = begin + leaves[plan.order[i]].bytes;
    }
  }
}

bool is_refused(const FlatTree& flat, size_t node) {
  const TreeSpec::Node& it = flat.spec.node(node);
  if (it.kind != NodeKind::kLeaf) {
    return std::ranges::any_of(flat.delegated,
                               [=](const Delegated& leaf) { return leaf.node == node; });
  }
  const LeafTable& leaves = flat.groups[it.group].leaves;
  return !leaves.device().is_cpu() || !can_be_packed(leaves[it.number].dtype);
}

void refuse_what_cannot_be_packed(const FlatTree& flat, py::handle data) {
  for (size_t node = 0; node < flat.spec.nodes(); ++node) {
    if (!is_refused(flat, node)) continue;
    throw py::type_error(path_of(data, node, c10::Device(c10::kCPU)).value_or("a leaf of data") +
                         " cannot be packed: only plain tensors and arrays on the host can");
  }
}

void copy_leaves(SourceGroup&& group, std::shared_ptr<const PackPlan> plan,
                 const c10::Storage& bytes, uint64_t body_begin) {
  const c10::Device host(c10::kCPU);
  LeafGroup leaves{host,
                   {std::make_shared<const LeafTable>(std::move(group.leaves)), std::move(plan),
                    std::move(group.sources)},
                   group.mapped};
  leaves.image = bytes;
  leaves.image_begin = body_begin;
  PhaseTimes phases;
  const WaitWithoutGil waiting;
  const StartedJob started = start(
      std::move(leaves),
      {.use_pinned_staging = false, .pack = PackOptions(), .use_background_thread = true}, phases);
  if (!started.on_workers) {
    started.job->run();
  } else {
    started.job->help();
  }
  started.job->wait_done();
  if (started.job->has_failed()) started.job->rethrow_failure();
}

}  // namespace

std::unique_ptr<Parcel> pack(py::handle data, py::handle pickle, py::handle unpickle) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  FlatTree flat = flatten_for_parcel(data);
  refuse_what_cannot_be_packed(flat, data);
  LeafTable none(c10::Device(c10::kCPU));
  const LeafTable& leaves = flat.groups.empty() ? none : flat.groups.front().leaves;
  std::shared_ptr<const PackPlan> plan = parcel_plan(leaves);
  // Pickling runs foreign code, which may give leaves new memory before theirs has been read.
  if (!flat.groups.empty()) flat.groups.front().sources->keep_memory_of_tensors();
  ByteWriter layout;
  write_layout(flat.spec, leaves, pickle, layout);
  const uint64_t body_bytes = plan->chunks.empty() ? 0 : plan->chunks.back().end();
  ByteWriter head;
  const uint64_t body_begin = write_head(head, layout.written(), body_bytes);

  c10::Allocator* const allocator = c10::GetAllocator(c10::kCPU);
  const uint64_t total = body_begin + body_bytes;
  const c10::Storage bytes(c10::Storage::use_byte_size_t(), total, allocator->allocate(total),
                           allocator, /*resizable=*/true);
  auto* const first = static_cast<std::byte*>(bytes.mutable_data());
  std::ranges::copy(head.written(), first);
  std::fill(first + head.written().size(), first + body_begin, std::byte{0});
  clear_gaps(leaves, *plan, first + body_begin);
  std::shared_ptr<const ParcelLayout> read = read_layout(layout.written(), unpickle, body_bytes);
  if (!flat.groups.empty()) copy_leaves(std::move(flat.groups.front()), plan, bytes, body_begin);
  return std::make_unique<Parcel>(std::move(read), bytes, body_begin);
}

}  // namespace tdcopier
