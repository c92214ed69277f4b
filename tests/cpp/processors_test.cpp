// Quotas of cgroups, from files as the kernel writes them.
#include "base/processors.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"

using namespace tdcopier;
namespace fs = std::filesystem;

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

 private:
  const fs::path root_;
};

void version_2_gives_a_quota_or_none() {
  const Cgroups groups;
  groups.write("self", "0::/jobs/inner\n");
  CHECK(!groups.quota());
  groups.write("mount/jobs/inner/cpu.max", "max 100000\n");
  CHECK(!groups.quota());
  groups.write("mount/jobs/inner/cpu.max", "150000 100000\n");
  CHECK(groups.quota() == 1.5);
}

void the_tightest_on_the_way_to_the_root_counts() {
  const Cgroups groups;
  groups.write("self", "0::/jobs/inner\n");
  groups.write("mount/jobs/inner/cpu.max", "400000 100000\n");
  groups.write("mount/jobs/cpu.max", "200000 100000\n");
  CHECK(groups.quota() == 2.0);
  groups.write("mount/cpu.max", "50000 100000\n");  // as a container sees its own
  CHECK(groups.quota() == 0.5);
}

void version_1_is_read_where_the_controller_is_cpu() {
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

void what_cannot_be_read_bounds_nothing() {
  const Cgroups groups;
  CHECK(!groups.quota());
  groups.write("self", "nonsense\n0::\n");
  groups.write("mount/cpu.max", "a few\n");
  CHECK(!groups.quota());
}

void there_is_always_one_processor() {
  CHECK(usable_processors() >= 1);
}

}  // namespace

int main() {
  return run_cases({
      {"version 2 gives a quota or none", version_2_gives_a_quota_or_none},
      {"the tightest on the way to the root counts", the_tightest_on_the_way_to_the_root_counts},
      {"version 1 is read where the controller is cpu",
       version_1_is_read_where_the_controller_is_cpu},
      {"what cannot be read bounds nothing", what_cannot_be_read_bounds_nothing},
      {"there is always one processor", there_is_always_one_processor},
  });
}
