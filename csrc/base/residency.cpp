// Asks the kernel: with mincore(), page by page, and by /proc/self/maps.
#include "base/residency.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
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
  constexpr std::array<std::string_view, 3> kInMemory{"/dev/", "/memfd:", "/SYSV"};
  std::ifstream lines("/proc/self/maps");
  // "7f5c4000-7f5c5000 r--p 00000000 08:01 42  /path"
  for (std::string line; std::getline(lines, line);) {
    const size_t begins = line.find('/');
    if (begins == std::string::npos) continue;
    const std::string_view path = std::string_view(line).substr(begins);
    if (std::ranges::any_of(kInMemory, [&](auto name) { return path.starts_with(name); })) continue;
    uintptr_t begin = 0;
    uintptr_t end = 0;
    const char* const last = line.data() + line.size();
    const auto first = std::from_chars(line.data(), last, begin, 16);
    if (first.ptr == last || *first.ptr != '-') continue;
    if (std::from_chars(first.ptr + 1, last, end, 16).ec == std::errc()) ends_[begin] = end;
  }
}

bool FileMappings::has(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto next = ends_.upper_bound(at);
  return next != ends_.begin() && at < std::prev(next)->second;
}

}  // namespace tdcopier
