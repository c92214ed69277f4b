// The memory of results: of which stream on a device, and on the host leased, pinned or pageable.
#pragma once

#include <cstdint>

#include "engine/jobs/route.h"

namespace tdcopier {

// From this size on, results on the host are leased from the PinnedPool, whose pages several
// threads make, in sizes that are not rounded up: the first 5.4 GB of 510 leaves took 5.2 s from
// torch's allocator, and 0.4 s so (H200).
inline constexpr uint64_t kLeastLeasedResultBytes = 64 * 1024 * 1024;

// Changes this limit, for tests and comparisons. Thread: any.
void set_least_leased_bytes(uint64_t bytes);

// Makes a result on a device, in memory of the stream on which its job writes it, or with
// `in_callers_order` of the current stream. Requires: a plan. Thread: the caller's.
void make_result_on_device(LeafGroup& group, bool in_callers_order);

// Makes a result on the host: in pinned memory, or in pageable memory if no more can be pinned and
// the caller does not insist. Returns whether it is pinned. Requires: a plan.
bool make_result_on_host(LeafGroup& group, const RouteOptions& options);

}  // namespace tdcopier
