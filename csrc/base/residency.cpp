// Asks the kernel with mincore(), page by page.
#include "base/residency.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
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

}  // namespace tdcopier
