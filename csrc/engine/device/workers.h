// The engine's thread pools; default_worker_count() in base/thread_pool.h sets their size.
#pragma once

#include <c10/core/Device.h>

#include "base/thread_pool.h"

namespace tdcopier {

// Threads that stage and enqueue large copies. Made at first use; a forked child has none of them
// and makes its own. Thread: any.
ThreadPool& workers();

// Threads that wait for data that arrives on the host from `source`, and write it to its
// destinations. Each device has a pool of its own, so that neither staging nor data from another
// device waits for these threads.
ThreadPool& arrivals(c10::Device source);

// Threads that stage copies into existing memory on `target`. They may wait for kernels there, so
// no other copy's staging waits for them.
ThreadPool& fillers(c10::Device target);

// One thread that checks, between calls, which resources devices have finished with (see
// reclaim.h).
ThreadPool& reclaimer_thread();

// Makes all pools, and wakes their idle threads to look for work. Returns the number of threads.
size_t wake_workers();

// Waits until all pools are idle. Blocks: until then. GIL: must not be held.
void rest_workers();

// Closes all pools: later copies run in the calling thread. Blocks: until every job that workers
// have begun is enqueued and every source of a device is given back. GIL: must not be held.
void shut_down_workers();

}  // namespace tdcopier
