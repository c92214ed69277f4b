// Starts copies to a device: from a nested structure to a handle.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/moves/windows.h"
#include "python/handle/handle.h"
#include "python/walk/unknown_values.h"

namespace tdcopier {

// Up to this many bytes are staged in the call: a copy of this order takes about as long as waking
// a worker, 8 us.
inline constexpr uint64_t kMaxInlineBytes = 512 * 1024;
// Changes that limit, for tests that use workers for small copies. Thread: any.
void set_max_inline_bytes(uint64_t bytes);
uint64_t max_inline_bytes();

// Returns the best window sizes for staging host sources with this plan.
WindowBytes best_window_bytes(const PackPlan& plan, bool mapped);

// When the transfers of a staged batch are enqueued on the copy stream. A copy is deferred only if
// workers may be used, all of it is staged, and memory to hold it is available. A thread that
// defers its copies keeps the sources until its next call, by when it may have dropped them (see
// sources.h).
enum class Sending : uint8_t {
  kAtOnce,          // by the participant that staged a part, at once
  kDeferred,        // deferred: by the thread that uses the copy, see CopyJob::send()
  kDeferredAlone,   // also deferred, and the calling thread stages it, unless a disk must be read
  kDeferredStaged,  // also deferred, and workers stage even small copies
};

// The options of `start_copy` in tdcopier/_copy.py, which documents and checks them.
struct CopyOptions {
  bool use_pinned_staging;
  PackOptions pack;
  bool use_background_thread;
  OnUnknown on_unknown = OnUnknown::kRefuseRoot;
  bool requires_pinned_results = false;
  Sending sending = Sending::kAtOnce;
  // For start_copy_into() only: the device reads large pinned sources in place. No wait() holds the
  // host for that, so the caller must not write to them before the copy is done.
  bool reads_pinned_in_place = false;
};

// Starts a copy. Throws if the call itself is wrong; a failure of the copy is reported by the
// handle. Blocks: while the host is too far ahead of the device (see RunAhead).
std::unique_ptr<Handle> start_copy(pybind11::handle data, pybind11::handle device,
                                   const CopyOptions& options);

// Like start_copy(), but copies rows that are selected by index. `rows` is a RowIndex and `readers`
// a RowReaders of tdcopier/_rows/request.py. Throws IndexError too, if a row is out of range,
// before any row is read.
std::unique_ptr<Handle> start_gather(pybind11::handle storage, pybind11::handle rows,
                                     pybind11::handle readers, pybind11::handle device,
                                     const CopyOptions& options);

// Returns the pack plan of a copy of these leaves. `prepared`: null, or the plan for leaves like
// them.
std::shared_ptr<const PackPlan> plan_of(const LeafTable& leaves, const PackOptions& options,
                                        std::shared_ptr<const PackPlan> prepared = nullptr);

class PreparedCopy;
class RowLeaves;

// Starts either kind of copy to a parsed target. `prepared`: null, or the plan for such data.
// `rows`: null, or the rows to copy, and then every leaf is a table.
std::unique_ptr<Handle> start_copy_to(c10::Device target, pybind11::handle data,
                                      const CopyOptions& options, PreparedCopy* prepared,
                                      RowLeaves* rows = nullptr);

}  // namespace tdcopier
