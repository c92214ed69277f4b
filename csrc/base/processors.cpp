// Affinity from the scheduler, quotas from the files of both versions of cgroups.
#include "base/processors.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

namespace tdcopier {
namespace {

size_t allowed_processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  return static_cast<size_t>(std::max(CPU_COUNT(&allowed), 1));
}

// Of version 2: "max 100000" or "150000 100000", a quota and a period in microseconds.
std::optional<double> quota_of_version_2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// Of version 1: a file each; a quota of -1 is none.
std::optional<double> quota_of_version_1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (!(quota_file >> quota) || !(period_file >> period)) return std::nullopt;
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// From the group itself up to the mount, whose own files count too: a container often sees its
// group there, under another path than the kernel's.
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

bool has_controller(const std::string& list, const std::string& wanted) {
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == wanted) return true;
  }
  return false;
}

}  // namespace

std::optional<double> processor_quota(const std::string& memberships, const std::string& mount) {
  std::ifstream file(memberships);
  std::optional<double> found;
  // Lines such as "0::/user.slice" of version 2, "4:cpu,cpuacct:/docker/1f2e" of version 1.
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    std::optional<double> quota;
    if (controllers.empty()) {
      quota = tightest(mount, group, quota_of_version_2);
    } else if (has_controller(controllers, "cpu")) {
      quota = tightest(mount + "/cpu", group, quota_of_version_1);
    }
    if (quota && (!found || *quota < *found)) found = quota;
  }
  return found;
}

size_t usable_processors() {
  const size_t allowed = allowed_processors();
  const std::optional<double> quota = processor_quota("/proc/self/cgroup", "/sys/fs/cgroup");
  if (!quota) return allowed;
  return std::clamp<size_t>(static_cast<size_t>(std::ceil(*quota)), 1, allowed);
}

}  // namespace tdcopier
