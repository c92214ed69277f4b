// Asks the kernel: with mincore(), page by page, and by /proc/self/maps.
#include "base/residency.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace tdcopier {

bool is_resident(const void* data, size_t bytes) {
  if (bytes == 0) return true;
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = address / page * page;
  const uintptr_t length = address + bytes - begin;
  std::vector<unsigned char> pages((length + page - 1) / page);
  if (::mincore(reinterpret_cast<void*>(begin), length, pages.data()) != 0) return true;
  return std::all_of(pages.begin(), pages.end(), [](unsigned char flags) { return flags & 1; });
}

FileMappings::FileMappings() {
  std::ifstream lines("/proc/self/maps");
  for (std::string line; std::getline(lines, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    const size_t path = line.find('/');
    if (path == std::string::npos) continue;
    const auto is_at = [&](const char* name) {
      return line.compare(path, std::string(name).size(), name) == 0;
    };
    if (is_at("/dev/") || is_at("/memfd:") || is_at("/SYSV")) continue;
    if (std::sscanf(line.c_str(), "%zx-%zx", &begin, &end) == 2) ends_[begin] = end;
  }
}

bool FileMappings::has(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto next = ends_.upper_bound(at);
  return next != ends_.begin() && at < std::prev(next)->second;
}

}  // namespace tdcopier
