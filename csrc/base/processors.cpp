// Reads the affinity from the scheduler, and quotas and cpusets from cgroup files (v1 and v2).
#include "base/processors.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string_view>

namespace tdcopier {
namespace {

constexpr size_t kMostProcessors = 1 << 20;  // more than any kernel supports

std::optional<size_t> number_in(std::string_view text) {
  size_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// Returns the number of processors in a list such as "0-7,16-23"; 0 if it is malformed.
size_t processors_in(const std::string& list) {
  size_t count = 0;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    const size_t dash = range.find('-');
    const auto first = number_in(std::string_view(range).substr(0, dash));
    const auto last =
        dash == std::string::npos ? first : number_in(std::string_view(range).substr(dash + 1));
    if (!first || !last || *last < *first) return 0;
    count += *last - *first + 1;
  }
  return count;
}

// Reads cpu.max of version 2: a quota and a period in microseconds, for example "150000 100000". A
// quota of "max" means none.
std::optional<double> quota_of_version_2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// Reads the two files of version 1. A quota of -1 means none.
std::optional<double> quota_of_version_1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (!(quota_file >> quota) || !(period_file >> period)) return std::nullopt;
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// Returns the smallest quota from the group up to the mount. The mount's own files count too: a
// container often sees its group there, under another path than the kernel reports.
template <typename Quota>
std::optional<double> tightest(const std::string& mount, std::string group, const Quota& quota_of) {
  std::optional<double> found;
  for (;;) {
    const std::optional<double> quota = quota_of(mount + group);
    if (quota && (!found || *quota < *found)) found = quota;
    const size_t last = group.find_last_of('/');
    if (last == std::string::npos) return found;
    group.resize(last);
  }
}

// Returns the size of the group's cpuset, or of its nearest ancestor's that can be read. The
// effective set of a group already respects its ancestors'.
std::optional<size_t> nearest_cpuset(const std::string& mount, std::string group,
                                     const std::string& name) {
  for (;;) {
    std::string list;
    std::ifstream file(mount + group + "/" + name);
    if (file >> list && processors_in(list) > 0) return processors_in(list);
    const size_t last = group.find_last_of('/');
    if (last == std::string::npos) return std::nullopt;
    group.resize(last);
  }
}

bool has_controller(const std::string& list, const std::string& wanted) {
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == wanted) return true;
  }
  return false;
}

// Calls `visit(controllers, group)` for each line, for example "0::/user.slice" of version 2, which
// lists no controllers, and "4:cpu,cpuacct:/docker/1f2e" of version 1.
template <typename Visit>
void visit_groups(const std::string& memberships, const Visit& visit) {
  std::ifstream file(memberships);
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    visit(line.substr(first + 1, second - first - 1), group);
  }
}

constexpr const char* kMemberships = "/proc/self/cgroup";
constexpr const char* kMount = "/sys/fs/cgroup";

}  // namespace

std::optional<double> processor_quota(const std::string& memberships, const std::string& mount) {
  std::optional<double> found;
  visit_groups(memberships, [&](const std::string& controllers, const std::string& group) {
    std::optional<double> quota;
    if (controllers.empty()) {
      quota = tightest(mount, group, quota_of_version_2);
    } else if (has_controller(controllers, "cpu")) {
      quota = tightest(mount + "/cpu", group, quota_of_version_1);
    }
    if (quota && (!found || *quota < *found)) found = quota;
  });
  return found;
}

std::optional<size_t> cpuset_processors(const std::string& memberships, const std::string& mount) {
  std::optional<size_t> found;
  visit_groups(memberships, [&](const std::string& controllers, const std::string& group) {
    std::optional<size_t> count;
    if (controllers.empty()) {
      count = nearest_cpuset(mount, group, "cpuset.cpus.effective");
    } else if (has_controller(controllers, "cpuset")) {
      count = nearest_cpuset(mount + "/cpuset", group, "cpuset.effective_cpus");
    }
    if (count && (!found || *count < *found)) found = count;
  });
  return found;
}

size_t allowed_processors(AskAffinity ask) {
  for (size_t size = CPU_SETSIZE; size <= kMostProcessors; size *= 2) {
    const auto free_set = [](cpu_set_t* set) { CPU_FREE(set); };
    const std::unique_ptr<cpu_set_t, decltype(free_set)> allowed(CPU_ALLOC(size), free_set);
    const size_t bytes = CPU_ALLOC_SIZE(size);
    if (allowed == nullptr) break;
    CPU_ZERO_S(bytes, allowed.get());
    if (ask(0, bytes, allowed.get()) == 0) {
      return static_cast<size_t>(std::max(CPU_COUNT_S(bytes, allowed.get()), 1));
    }
    if (errno != EINVAL) break;  // EINVAL: the kernel has more processors than `size`
  }
  return 1;
}

size_t processes_on_machine(const char* local_world_size) {
  if (local_world_size == nullptr) return 1;
  return std::max<size_t>(number_in(local_world_size).value_or(1), 1);
}

size_t share_of_processors(size_t allowed, size_t together, size_t processes) {
  return std::clamp<size_t>(together / processes, 1, allowed);
}

size_t usable_processors() {
  const size_t allowed = allowed_processors();
  size_t together = std::max(cpuset_processors(kMemberships, kMount).value_or(allowed), allowed);
  if (const std::optional<double> quota = processor_quota(kMemberships, kMount)) {
    together = std::min(together, static_cast<size_t>(std::ceil(*quota)));
  }
  const size_t processes = processes_on_machine(std::getenv("LOCAL_WORLD_SIZE"));
  return share_of_processors(allowed, together, processes);
}

}  // namespace tdcopier
