// Starts copies to a device: from a nested structure to a handle.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/jobs/route.h"
#include "python/handle/handle.h"
#include "python/walk/flatten.h"
#include "python/walk/unknown_values.h"

namespace tdcopier {

// The options of `start_copy` in tdcopier/_copy.py, which documents and checks them.
struct CopyOptions : RouteOptions {
  OnUnknown on_unknown = OnUnknown::kRefuseRoot;
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

// Returns the leaves of a walk as a group for the engine. `prepared`: null, or the plan for leaves
// like them.
LeafGroup group_for(c10::Device target, SourceGroup&& group, const CopyOptions& options,
                    std::shared_ptr<const PackPlan> prepared = nullptr);

// Starts the job of one group. The handle gets it, or the failure.
void start_group(Handle& handle, LeafGroup&& group, const CopyOptions& options);

class PreparedCopy;
class RowLeaves;

// Starts either kind of copy to a parsed target. `prepared`: null, or the plan for such data.
// `rows`: null, or the rows to copy, and then every leaf is a table.
std::unique_ptr<Handle> start_copy_to(c10::Device target, pybind11::handle data,
                                      const CopyOptions& options, PreparedCopy* prepared,
                                      RowLeaves* rows = nullptr);

}  // namespace tdcopier
