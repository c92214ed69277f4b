// From a nested structure to a handle: the order of the steps of one call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/stage.h"
#include "python/handle.h"

namespace tdcopier {

// Up to this many bytes are staged in the call: waking a worker costs about 8 us, and so does a
// copy of this order.
inline constexpr uint64_t kMaxInlineBytes = 512 * 1024;
// Another bound, for tests that want workers for little. Thread: any.
void set_max_inline_bytes(uint64_t bytes);
uint64_t max_inline_bytes();

// How large the windows are best in which host sources with this plan are staged.
WindowBytes best_window_bytes(const PackPlan& plan, bool mapped);

// Who puts the transfers of staged batches on the copy stream.
enum class Sending : uint8_t {
  kAtOnce,      // whoever has staged a part, at once
  kHeld,        // whoever uses the copy, see HeldSourceJob
  kHeldStaged,  // the same, and the caller stages nothing himself, however little it is
};

// For the copies that this thread starts from now on. A copy is held only if it can be: workers
// may be used, all of it is staged, and there is memory to hold it.
void set_sending(Sending sending);

// As `start_copy` of tdcopier/_copy.py says, and checked there.
struct CopyOptions {
  bool use_pinned_staging;
  PackOptions pack;
  bool use_background_thread;
};

// Throws what is wrong with the call. A copy that fails does so in the handle.
// Blocks: while the host is too far ahead of the device (see RunAhead).
std::unique_ptr<Handle> start_copy(pybind11::handle data, pybind11::handle device,
                                   const CopyOptions& options);

// The same of rows that are picked by number: a RowIndex and a RowReaders of
// tdcopier/_row_request.py. Throws IndexError too, where one is out of range, before any is read.
std::unique_ptr<Handle> start_gather(pybind11::handle storage, pybind11::handle rows,
                                     pybind11::handle readers, pybind11::handle device,
                                     const CopyOptions& options);

class PreparedCopy;
class RowLeaves;

// The same, once the target is known. `prepared`: null, or what is known of such data beforehand.
// `rows`: null, or every leaf is a table of which it says what rows are copied.
std::unique_ptr<Handle> start_copy_to(c10::Device target, pybind11::handle data,
                                      const CopyOptions& options, PreparedCopy* prepared,
                                      RowLeaves* rows = nullptr);

}  // namespace tdcopier
