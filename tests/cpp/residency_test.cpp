// Tests which bytes of a mapped file count as in memory.
#include "base/residency.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "check.h"

namespace residency_test {
namespace {

using tdcopier::is_resident;

constexpr size_t kBytes = 64 * 4096;

CASE(bytes_in_use_are_resident) {
  std::vector<char> memory(kBytes, 1);
  CHECK(is_resident(memory.data(), memory.size()));
  CHECK(is_resident(memory.data() + 5, 3));
  CHECK(is_resident(nullptr, 0));
}

CASE(a_hole_that_nobody_has_read_is_not_and_reading_it_makes_it_so) {
  char path[] = "/tmp/tdcopier-residency-XXXXXX";
  const int file = ::mkstemp(path);
  CHECK(file >= 0);
  ::unlink(path);
  CHECK(::ftruncate(file, kBytes) == 0);
  void* mapped = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, file, 0);
  CHECK(mapped != MAP_FAILED);
  const auto* bytes = static_cast<const volatile char*>(mapped);
  CHECK(!is_resident(mapped, kBytes));
  int sum = 0;
  for (size_t at = 0; at < kBytes; at += 4096) sum += bytes[at];
  CHECK(sum == 0);
  CHECK(is_resident(mapped, kBytes));
  CHECK(is_resident(static_cast<const char*>(mapped) + 4097, 10));
  ::munmap(mapped, kBytes);
  ::close(file);
}

CASE(what_is_not_mapped_cannot_be_told) {
  void* mapped = ::mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED);
  ::munmap(mapped, 4096);
  CHECK(is_resident(mapped, 4096));
}

}  // namespace
}  // namespace residency_test
