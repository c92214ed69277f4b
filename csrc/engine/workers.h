// The engine's threads.
#pragma once

#include <c10/core/Device.h>

#include "base/thread_pool.h"

namespace tdcopier {

// Stage and enqueue large copies. Made at first use; a forked child has none of them and makes its
// own. Thread: any.
ThreadPool& workers();

// Wait for what arrives on the host from `source`, and write it where it belongs. A pool for each
// device: neither whoever stages nor what another device sends waits behind them for this one.
ThreadPool& arrivals(c10::Device source);

// Stage copies into memory that exists on `target`. They may wait for kernels there, so no other
// copy's staging waits for these threads.
ThreadPool& fillers(c10::Device target);

// One thread that looks, between calls, for what devices have finished with (see reclaim.h).
ThreadPool& reclaimer_thread();

// Makes all of them, and lets those of their threads that have nothing to do look again. Returns
// how many threads there are.
size_t wake_workers();

// Blocks: until none of them has anything to do. GIL: must not be held.
void rest_workers();

// Blocks: until every job that workers have begun is enqueued and every source of a device is given
// back. Later copies run in the calling thread. GIL: must not be held.
void shut_down_workers();

}  // namespace tdcopier
