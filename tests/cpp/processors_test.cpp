// Tests quotas and cpusets of cgroups, from files as the kernel writes them, and shares of several
// processes.
#include "base/processors.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"

using namespace tdcopier;
namespace fs = std::filesystem;

namespace processors_test {
namespace {

// A folder with a membership file and a mount, removed at the end.
class Cgroups {
 public:
  Cgroups() : root_(fs::temp_directory_path() / ("tdc-cgroups-" + std::to_string(::getpid()))) {
    fs::remove_all(root_);
    fs::create_directories(root_ / "mount");
  }
  ~Cgroups() { fs::remove_all(root_); }

  void write(const std::string& file, const std::string& text) const {
    const fs::path path = root_ / file;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::optional<double> quota() const { return processor_quota(root_ / "self", root_ / "mount"); }
  std::optional<size_t> cpuset() const {
    return cpuset_processors(root_ / "self", root_ / "mount");
  }

 private:
  const fs::path root_;
};

CASE(version_2_gives_a_quota_or_none) {
  const Cgroups groups;
  groups.write("self", "0::/jobs/inner\n");
  CHECK(!groups.quota());
  groups.write("mount/jobs/inner/cpu.max", "max 100000\n");
  CHECK(!groups.quota());
  groups.write("mount/jobs/inner/cpu.max", "150000 100000\n");
  CHECK(groups.quota() == 1.5);
}

CASE(the_tightest_on_the_way_to_the_root_counts) {
  const Cgroups groups;
  groups.write("self", "0::/jobs/inner\n");
  groups.write("mount/jobs/inner/cpu.max", "400000 100000\n");
  groups.write("mount/jobs/cpu.max", "200000 100000\n");
  CHECK(groups.quota() == 2.0);
  groups.write("mount/cpu.max", "50000 100000\n");  // as a container sees its own quota
  CHECK(groups.quota() == 0.5);
}

CASE(version_1_is_read_where_the_controller_is_cpu) {
  const Cgroups groups;
  groups.write("self", "5:cpuset:/jobs\n4:cpu,cpuacct:/jobs\n1:name=systemd:/jobs\n");
  groups.write("mount/cpuset/jobs/cpu.cfs_quota_us", "100000\n");
  groups.write("mount/cpuset/jobs/cpu.cfs_period_us", "100000\n");
  groups.write("mount/cpu/jobs/cpu.cfs_quota_us", "-1\n");
  groups.write("mount/cpu/jobs/cpu.cfs_period_us", "100000\n");
  CHECK(!groups.quota());
  groups.write("mount/cpu/jobs/cpu.cfs_quota_us", "300000\n");
  CHECK(groups.quota() == 3.0);
}

CASE(what_cannot_be_read_bounds_nothing) {
  const Cgroups groups;
  CHECK(!groups.quota());
  groups.write("self", "nonsense\n0::\n");
  groups.write("mount/cpu.max", "a few\n");
  CHECK(!groups.quota());
}

CASE(there_is_always_one_processor) {
  CHECK(usable_processors() >= 1);
}

CASE(a_cpuset_is_that_of_the_nearest_group_that_says) {
  const Cgroups groups;
  groups.write("self", "0::/jobs/inner\n");
  CHECK(!groups.cpuset());
  groups.write("mount/cpuset.cpus.effective", "0-63\n");
  CHECK(groups.cpuset() == size_t{64});
  groups.write("mount/jobs/inner/cpuset.cpus.effective", "0-3,8,16-17\n");
  CHECK(groups.cpuset() == size_t{7});
  for (const char* nothing : {"\n", "several\n", "7-3\n"}) {
    groups.write("mount/jobs/inner/cpuset.cpus.effective", nothing);
    CHECK(groups.cpuset() == size_t{64});
  }
}

CASE(version_1_has_a_cpuset_of_its_own) {
  const Cgroups groups;
  groups.write("self", "5:cpuset:/jobs\n4:cpu,cpuacct:/jobs\n");
  groups.write("mount/cpuset/jobs/cpuset.effective_cpus", "2-5\n");
  CHECK(groups.cpuset() == size_t{4});
}

// Answers like a machine with 3000 processors.
int affinity_of_many(pid_t, size_t bytes, cpu_set_t* allowed) {
  if (bytes * 8 < 3000) {
    errno = EINVAL;
    return -1;
  }
  for (size_t i = 0; i < 3000; ++i) CPU_SET_S(i, bytes, allowed);
  return 0;
}

int affinity_that_is_refused(pid_t, size_t, cpu_set_t*) {
  errno = EPERM;
  return -1;
}

CASE(more_processors_than_a_set_of_fixed_size_holds_are_counted) {
  CHECK(allowed_processors(affinity_of_many) == 3000);
  CHECK(allowed_processors(affinity_that_is_refused) == 1);
  CHECK(allowed_processors() >= 1);
}

CASE(processes_of_one_launcher_share_the_processors) {
  CHECK(share_of_processors(16, 16, 8) == 2);
  CHECK(share_of_processors(16, 16, 5) == 3);
  CHECK(share_of_processors(2, 2, 8) == 1);
  CHECK(share_of_processors(16, 16, 1) == 16);
}

CASE(a_process_that_is_bound_to_its_part_has_all_of_it) {
  CHECK(share_of_processors(8, 64, 8) == 8);   // bound to its own processors
  CHECK(share_of_processors(32, 64, 8) == 8);  // bound to half of the machine, with three others
}

CASE(nonsense_in_the_variable_is_one_process) {
  CHECK(processes_on_machine("8") == 8);
  CHECK(processes_on_machine(nullptr) == 1);
  for (const char* text : {"", "0", "-2", "8.5", "many", " 8", "99999999999999999999999"}) {
    CHECK(processes_on_machine(text) == 1);
  }
}

}  // namespace
}  // namespace processors_test
