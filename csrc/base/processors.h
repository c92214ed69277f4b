// How many processors this process may keep busy.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace tdcopier {

// Those that this thread may run on, or fewer where a cgroup bounds the process's time: rounded up,
// 1 at least. Thread: any. Asks the system each time.
size_t usable_processors();

// The tightest bound on the way from the process's cgroup to the root, in processors; none, or
// nothing that can be read: nullopt. `memberships` is a file such as /proc/self/cgroup, and `mount`
// where cgroups are, such as /sys/fs/cgroup.
std::optional<double> processor_quota(const std::string& memberships, const std::string& mount);

}  // namespace tdcopier
