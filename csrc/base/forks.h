// Counts forks, so that a child process avoids objects whose locks its parent's threads may hold.
// In a child, `Handle` refuses the parent's copies, `HostToDeviceJob` sends none of them, and
// accelerator.cpp, thread_pools.cpp, reclaim.cpp and pinned_pool.cpp start anew; sources.cpp,
// recorded_streams.cpp and recycled.cpp hold their locks across a fork. `git grep fork_generation`
// and `git grep pthread_atfork` show all that act on one. tdcopier/_prefetch/queue.py does the same
// for prefetchers. A child may start copies of its own: within the host always, to a device where
// torch allows the child to use it.
#pragma once

#include <cstdint>

namespace tdcopier {

// Starts counting. Call before the first fork that matters; later calls do nothing. Thread: any.
void watch_forks();

// Returns the number of forks between the process that called watch_forks() and this one. An object
// that was made in another generation belongs to an ancestor process.
uint32_t fork_generation();

// Returns a number that changes whenever this process forks: of an object that existed with another
// one, a child has a copy, and it sees what is written to shared memory.
uint64_t fork_mark();

}  // namespace tdcopier
