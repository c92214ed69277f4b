// Counts the processors that this process may keep busy.
#pragma once

#include <sched.h>

#include <cstddef>
#include <optional>
#include <string>

namespace tdcopier {

// Returns the number of processors that this thread may run on, or fewer if a cgroup limits the
// process's time (rounded up) or if a launcher such as torchrun has started several processes on
// the machine, which share its processors. At least 1. Thread: any. Asks the system on each call.
size_t usable_processors();

// Returns the tightest quota from the process's cgroup up to the root, in processors; nullopt if
// there is none or none can be read. `memberships` is a file such as /proc/self/cgroup, and `mount`
// the folder of cgroups, such as /sys/fs/cgroup.
std::optional<double> processor_quota(const std::string& memberships, const std::string& mount);

// Returns how many processors the process's cgroup may use. All processes of a launcher share
// these, although each may be bound to a few of them. nullopt as above.
std::optional<size_t> cpuset_processors(const std::string& memberships, const std::string& mount);

using AskAffinity = int (*)(pid_t, size_t, cpu_set_t*);

// Returns how many processors this thread may run on, for machines of any size; 1 if the system
// does not tell.
size_t allowed_processors(AskAffinity ask = sched_getaffinity);

// Parses the value of the variable LOCAL_WORLD_SIZE; null: it is not set. Returns 1 unless it is a
// positive integer.
size_t processes_on_machine(const char* local_world_size);

// Returns the share of one of `processes` processes that use `together` processors and may run on
// `allowed` of them.
size_t share_of_processors(size_t allowed, size_t together, size_t processes);

}  // namespace tdcopier
