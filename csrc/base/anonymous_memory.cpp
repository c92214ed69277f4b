// mmap() and madvise(), aligned to huge pages.
#include "base/anonymous_memory.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <new>
#include <utility>

namespace tdcopier {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Linux 5.14; the C library's headers may be older.
constexpr int kPopulateWrite = 23;

void unmap(uintptr_t begin, uintptr_t end) {
  if (begin != end) ::munmap(reinterpret_cast<void*>(begin), end - begin);
}

}  // namespace

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t in_whole_pages(size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

// A huge page is 512 times fewer faults to take and pages to pin. On a machine with 4 processors,
// 4 threads made 2 GiB in 54 ms instead of 350 ms.
AnonymousMemory::AnonymousMemory(size_t bytes) {
  if (bytes == 0) return;
  const size_t size = in_whole_pages(bytes);
  const size_t alignment = size < kHugePageBytes ? page_bytes() : kHugePageBytes;
  const size_t spare = alignment - page_bytes();
  void* const mapped =
      ::mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  const auto first = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t begin = (first + alignment - 1) / alignment * alignment;
  unmap(first, begin);
  unmap(begin + size, first + size + spare);
  bytes_ = {reinterpret_cast<std::byte*>(begin), size};
  // Advice only: without huge pages the mapping works as well.
  if (size >= kHugePageBytes) ::madvise(bytes_.data(), size, MADV_HUGEPAGE);
}

AnonymousMemory::AnonymousMemory(AnonymousMemory&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})) {}

AnonymousMemory& AnonymousMemory::operator=(AnonymousMemory&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

AnonymousMemory::~AnonymousMemory() {
  const auto begin = reinterpret_cast<uintptr_t>(bytes_.data());
  unmap(begin, begin + bytes_.size());
}

void populate(std::span<std::byte> part, Advise advise) {
  while (advise(part.data(), part.size(), kPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) throw std::bad_alloc();
    for (size_t at = 0; at < part.size(); at += page_bytes()) {
      volatile std::byte& first = part[at];
      first = std::byte{first};
    }
    return;
  }
}

}  // namespace tdcopier
