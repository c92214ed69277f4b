// Tests that two mappings show one memory, whose size is fixed and which outlives its maker.
#include "base/shared_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "check.h"

using namespace tdcopier;

namespace shared_memory_test {
namespace {

std::string path_of(const SharedMemory& memory) {
  return "/proc/self/fd/" + std::to_string(memory.descriptor());
}

CASE(both_mappings_show_what_either_writes) {
  const SharedMemory made = SharedMemory::make(10'000);
  CHECK(made.bytes().size() % static_cast<size_t>(::sysconf(_SC_PAGESIZE)) == 0);
  CHECK(made.bytes().size() >= 10'000);
  for (const std::byte each : made.bytes()) CHECK(each == std::byte{0});
  const SharedMemory opened = SharedMemory::open(path_of(made));
  CHECK(opened.bytes().size() == made.bytes().size());
  CHECK(opened.bytes().data() != made.bytes().data());
  made.bytes()[9'999] = std::byte{7};
  CHECK(opened.bytes()[9'999] == std::byte{7});
  opened.bytes()[0] = std::byte{8};
  CHECK(made.bytes()[0] == std::byte{8});
}

CASE(a_mapping_outlives_the_one_that_made_it) {
  std::optional<SharedMemory> made = SharedMemory::make(1);
  made->bytes()[0] = std::byte{5};
  const SharedMemory opened = SharedMemory::open(path_of(*made));
  made.reset();
  CHECK(opened.bytes()[0] == std::byte{5});
}

CASE(the_size_cannot_be_changed) {
  const SharedMemory made = SharedMemory::make(100'000);
  CHECK(::ftruncate(made.descriptor(), 0) == -1);
  CHECK(::ftruncate(made.descriptor(), 1 << 30) == -1);
}

CASE(descriptors_are_closed) {
  int number = -1;
  {
    SharedMemory made = SharedMemory::make(1);
    number = made.descriptor();
    const SharedMemory moved = std::move(made);
    CHECK(moved.descriptor() == number);
    CHECK(::fcntl(number, F_GETFD) == FD_CLOEXEC);
  }
  CHECK(::fcntl(number, F_GETFD) == -1);
  SharedMemory other = SharedMemory::make(1);
  number = other.descriptor();
  other.close_descriptor();
  other.close_descriptor();
  CHECK(other.descriptor() == -1);
  CHECK(::fcntl(number, F_GETFD) == -1);
  other.bytes()[0] = std::byte{1};
}

CASE(what_cannot_be_opened_is_an_error) {
  for (const char* path : {"/proc/self/fd/9999", "/nowhere"}) {
    bool raised = false;
    try {
      SharedMemory::open(path);
    } catch (const std::system_error& error) {
      raised = error.code().value() == ENOENT;
    }
    CHECK(raised);
  }
}

}  // namespace
}  // namespace shared_memory_test
