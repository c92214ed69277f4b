// Memory straight from the system, whose pages several threads can make together.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>

namespace tdcopier {

size_t page_bytes();
// Returns the least number of bytes in whole pages that is not less.
size_t in_whole_pages(size_t bytes);

// A private mapping of whole pages, in huge pages of 2 MiB if the system has them. Returned to the
// system by the destructor.
class AnonymousMemory {
 public:
  AnonymousMemory() = default;
  // Reserves addresses; populate() makes the pages. Throws: std::bad_alloc.
  explicit AnonymousMemory(size_t bytes);
  AnonymousMemory(AnonymousMemory&& other) noexcept;
  AnonymousMemory& operator=(AnonymousMemory&& other) noexcept;
  ~AnonymousMemory();

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;  // empty: no mapping
};

using Advise = int (*)(void*, size_t, int);

// Makes the pages of a part, in whole pages, of an AnonymousMemory: by MADV_POPULATE_WRITE, or by
// writing to each page if the kernel does not know that. The bytes of pages that exist stay.
// Thread: any, for different parts at the same time. Throws: std::bad_alloc if the system refuses
// the pages. Without overcommit limits a system that has no more memory ends the process instead.
void populate(std::span<std::byte> part, Advise advise = ::madvise);

}  // namespace tdcopier
