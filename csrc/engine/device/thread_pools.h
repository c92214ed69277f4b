// The engine's thread pools, and their number of threads: default_worker_count() for staging, for
// pinning, and for each device that is copied into, at most 4 of those for each device that is
// copied from, and one that reclaims. The variable TDCOPIER_WORKERS limits it; tdcopier/_limits.py
// reads the variable.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

#include "base/thread_pool.h"

namespace tdcopier {

// Threads that stage and enqueue large copies. Made at first use; a forked child has none of them
// and makes its own. Thread: any.
ThreadPool& staging_workers();

// Threads that make pinned memory (see pinned_lease.h). No copy's staging waits for these.
ThreadPool& pinning_workers();

// Threads that wait for data that arrives on the host from `source`, and write it to its
// destinations. Each device has a pool of its own, so that neither staging nor data from another
// device waits for these threads.
ThreadPool& from_device_workers(c10::Device source);

// Threads that stage copies into existing memory on `target`. They may wait for kernels there, so
// no other copy's staging waits for them.
ThreadPool& into_device_workers(c10::Device target);

// One thread that checks, between calls, which resources devices have finished with (see
// reclaim.h).
ThreadPool& reclaimer_thread();

// Makes all pools, and wakes their idle threads to look for work. Returns the number of threads.
size_t wake_workers();

// Waits until all pools are idle. Blocks: until then. GIL: must not be held.
void rest_workers();

// Returns how many workers to create: this process's share of the processors, at most 12 or the
// limit that set_most_workers() has set.
size_t default_worker_count();
// Sets the limit for pools that are created from now on. At least 1. Thread: any.
void set_most_workers(size_t workers);

// Closes all pools: later copies run in the calling thread. Blocks: until every job that workers
// have begun is enqueued and every source of a device is given back. GIL: must not be held.
void shut_down_workers();

}  // namespace tdcopier
