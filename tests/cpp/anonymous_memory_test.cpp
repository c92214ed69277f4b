// Tests that pages are made by either way, keep their bytes, and that refusals are errors.
#include "base/anonymous_memory.h"

#include <cerrno>
#include <cstdint>
#include <new>
#include <utility>

#include "base/residency.h"
#include "check.h"

using namespace tdcopier;

namespace anonymous_memory_test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

int old_kernel(void* /*begin*/, size_t /*bytes*/, int /*advice*/) {
  errno = EINVAL;
  return -1;
}

int refusal(void* /*begin*/, size_t /*bytes*/, int /*advice*/) {
  errno = ENOMEM;
  return -1;
}

int g_interruptions = 0;
int interrupted(void* begin, size_t bytes, int advice) {
  if (g_interruptions++ > 2) return ::madvise(begin, bytes, advice);
  errno = EINTR;
  return -1;
}

template <typename Call>
bool throws_bad_alloc(const Call& call) {
  try {
    call();
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

CASE(sizes_are_whole_pages_and_large_ones_begin_at_a_huge_page) {
  CHECK(in_whole_pages(0) == 0);
  CHECK(in_whole_pages(1) == page_bytes());
  CHECK(in_whole_pages(page_bytes()) == page_bytes());
  CHECK(AnonymousMemory(0).bytes().empty());
  CHECK(AnonymousMemory(1).bytes().size() == page_bytes());
  for (const size_t bytes : {2 * kMiB, 5 * kMiB + 1}) {
    const AnonymousMemory memory(bytes);
    CHECK(memory.bytes().size() == in_whole_pages(bytes));
    CHECK(reinterpret_cast<uintptr_t>(memory.bytes().data()) % (2 * kMiB) == 0);
  }
}

CASE(populate_makes_the_pages_of_its_part) {
  for (const Advise advise : {Advise{::madvise}, Advise{old_kernel}, Advise{interrupted}}) {
    const AnonymousMemory memory(kMiB);
    const auto part = memory.bytes().subspan(kMiB / 2);
    CHECK(!is_resident(part.data(), part.size()));
    populate(part, advise);
    CHECK(is_resident(part.data(), part.size()));
    CHECK(!is_resident(memory.bytes().data(), kMiB / 2));
  }
  CHECK(g_interruptions > 2);
}

CASE(populate_keeps_the_bytes_of_pages_that_exist) {
  for (const Advise advise : {Advise{::madvise}, Advise{old_kernel}}) {
    const AnonymousMemory memory(kMiB);
    memory.bytes()[page_bytes()] = std::byte{7};
    populate(memory.bytes(), advise);
    CHECK(memory.bytes()[page_bytes()] == std::byte{7});
    CHECK(memory.bytes()[0] == std::byte{0});
  }
}

CASE(refusals_are_errors) {
  const AnonymousMemory memory(kMiB);
  CHECK(throws_bad_alloc([&] { populate(memory.bytes(), refusal); }));
  CHECK(throws_bad_alloc([] { AnonymousMemory(size_t{1} << 60); }));
}

CASE(a_mapping_moves_to_its_new_owner) {
  AnonymousMemory first(kMiB);
  std::byte* const begin = first.bytes().data();
  AnonymousMemory second(std::move(first));
  AnonymousMemory third;
  third = std::move(second);
  CHECK(third.bytes().data() == begin);
  third.bytes()[0] = std::byte{1};
  third = {};
  CHECK(third.bytes().empty());
}

}  // namespace
}  // namespace anonymous_memory_test
