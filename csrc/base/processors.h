// How many processors this process may keep busy.
#pragma once

#include <sched.h>

#include <cstddef>
#include <optional>
#include <string>

namespace tdcopier {

// Those that this thread may run on, or fewer where a cgroup bounds the process's time (rounded up)
// or a launcher such as torchrun has started several processes on the machine, which share its
// processors. 1 at least. Thread: any. Asks the system each time.
size_t usable_processors();

// The tightest bound on the way from the process's cgroup to the root, in processors; nullopt if
// there is none, or nothing that can be read. `memberships` is a file such as /proc/self/cgroup,
// and `mount` the folder of cgroups, such as /sys/fs/cgroup.
std::optional<double> processor_quota(const std::string& memberships, const std::string& mount);

// How many processors the process's cgroup may use, which all processes of a launcher share, where
// each of them may be bound to a few of these. nullopt as above.
std::optional<size_t> cpuset_processors(const std::string& memberships, const std::string& mount);

using AskAffinity = int (*)(pid_t, size_t, cpu_set_t*);

// How many processors this thread may run on, however many there are. 1 if the system does not say.
size_t allowed_processors(AskAffinity ask = sched_getaffinity);

// What the variable LOCAL_WORLD_SIZE says, or null where it is not set: 1 if it is no number.
size_t processes_on_machine(const char* local_world_size);

// For one of `processes` that use `together` processors, and which may run on `allowed` of them.
size_t share_of_processors(size_t allowed, size_t together, size_t processes);

}  // namespace tdcopier
