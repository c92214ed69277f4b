// The one decision how a group of leaves travels: by which job, in which windows, on which threads,
// and whether in the call. start() acts on it, and python/calls/explain.cpp reads it. It finds
// decided which leaves share a chunk and which travel alone (base/pack_plan.h, by size), and which
// are pinned (leaves/pinned_leaves.h).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/pack_plan.h"
#include "engine/device/bad_rows.h"
#include "engine/device/phases.h"
#include "engine/device/pinned_ranges.h"
#include "engine/jobs/copy_job.h"
#include "engine/jobs/from_device_job.h"
#include "engine/leaves/mapped_leaves.h"
#include "engine/moves/windows.h"

namespace tdcopier {

// Up to this many bytes are staged in the call: a copy of this order takes about as long as waking
// a worker, 8 us.
inline constexpr uint64_t kMaxInlineBytes = 512 * 1024;
// Up to this size a kernel gathers leaves straight into pinned memory, or into another device's: to
// gather them on their device and transfer them from there would take longer.
inline constexpr uint64_t kMaxStraightBytes = 4 * 1024 * 1024;

// Change these limits, for tests and comparisons. Thread: any.
void set_max_inline_bytes(uint64_t bytes);
void set_max_straight_bytes(uint64_t bytes);
// Lets batches be deferred, or sends all at once, for comparisons. Thread: any.
void use_deferred_batches(bool use);

// When the transfers of a staged batch are enqueued on the copy stream. A copy is deferred only if
// workers may be used, all of it is staged, and memory to hold it is available. What
// sources a deferred start_copy() has given back stay until the thread's next call, by when their
// owner may have dropped them (see python/walk/sources.cpp).
enum class Sending : uint8_t {
  kAtOnce,          // by the participant that staged a part, at once
  kDeferred,        // deferred: by the thread that uses the copy, see CopyJob::send()
  kDeferredAlone,   // also deferred, and the calling thread stages it, unless a disk must be read
  kDeferredStaged,  // also deferred, and workers stage even small copies
};
// Returns kAtOnce if no batch is to be deferred, or else what is asked for. Thread: any.
Sending usable(Sending asked);

struct RouteOptions {
  bool use_pinned_staging = true;
  PackOptions pack{};  // for new memory only
  bool use_background_thread = true;
  bool requires_pinned_results = false;
  Sending sending = Sending::kAtOnce;
  // For copies from the host to new memory of a device that need no staging buffer: the memory is
  // taken from that of the current stream, and written after the work that the stream has now. So
  // the copy gets what the caller's program has freed, and that gets it back. (Staging buffers
  // would wait for this work too, and then hold up the caller.) As with the next option, the caller
  // must not write to pinned sources before the copy is done.
  bool in_callers_order = false;
  // For existing memory only: the device reads large pinned sources in place. Where it does, no
  // wait() holds the host for any source, so the caller must not write to them before the copy is
  // done.
  bool reads_pinned_in_place = false;
};

// The leaves that go from one device to one other, or stay on it.
struct LeafGroup {
  c10::Device target;
  CopyWork work;          // without a result; with a plan if that of leaves like these is known
  MappedLeaves mapped{};  // among the sources
  // Set if the leaves, or their destinations, are pinned memory that the device at the other end
  // accesses itself, with a kernel.
  std::optional<PinnedTables> in_place{};
  // For a result that goes from the host to the host: the allocator of pinned memory; null: none.
  c10::Allocator* pinned_memory = nullptr;
  // For a result in existing memory of the host: see MemoryOf.
  c10::Storage image{};
  uint64_t image_begin = 0;
};

// Returns the device that moves the leaves; the host if none does.
inline c10::Device mover(const LeafGroup& group) {
  return group.target.is_cpu() ? group.work.leaves->device() : group.target;
}

// Makes the pack plan of a group, unless it has one that fits.
void make_plan(LeafGroup& group, const RouteOptions& options);

enum class JobKind : uint8_t { kRows, kHost, kHostToDevice, kFromDevice, kIntoHost };

struct Route {
  JobKind job;
  // Chunks that the device reads, or writes, in host memory itself. Those of kIntoHost are windows
  // too.
  std::vector<size_t> straight{};
  std::vector<Window> windows{};     // of jobs whose participants claim them
  std::vector<ChunkRange> ranges{};  // of a FromDeviceJob
};

// Returns how the group travels if all that the options ask for can be had. Requires: a plan.
Route find_route(const LeafGroup& group, const RouteOptions& options);
// Returns the transfers of a copy to new memory that takes this route. Copies nothing.
TransferCounts transfers_of(const Route& route, const LeafGroup& group);

// A job that has its result's memory. If no worker has it and it is not enqueued yet, the caller
// runs it.
struct StartedJob {
  std::shared_ptr<CopyJob> job;
  bool on_workers;
};

// Makes the job, and gives it to workers if it should run there. Times: Phase::kPlan. Blocks: an
// allocation may wait for the device. GIL: must not be held. Thread: the caller's, because its
// current streams are used.
// Throws: what the allocator throws; std::runtime_error if memory that only a device can read is no
// longer pinned, or if results must be pinned and cannot be.
StartedJob start(LeafGroup&& group, RouteOptions options, PhaseTimes& times);

// Adds the moves of rows in place to the graph that the caller's stream is capturing. Returns what
// watches the numbers of the rows; null if they are on the host.
// Throws: std::runtime_error if a storage is no longer pinned.
std::shared_ptr<BadRowWatch> capture(const LeafGroup& group);

}  // namespace tdcopier
