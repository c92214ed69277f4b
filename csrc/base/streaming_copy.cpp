// Copies two pages at a time, alternating between their cache lines.
#include "base/streaming_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/cache_line.h"

namespace tdcopier {

#ifdef __SSE2__

namespace {

constexpr size_t kPageBytes = 4096;

// Copies one cache line; `to` is aligned to it. Writes the line as a whole, because the memory
// would have to merge partial lines.
inline void copy_line(std::byte* to, const std::byte* from) {
  const auto* read = reinterpret_cast<const __m128i*>(from);
  auto* write = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(read);
  const __m128i b = _mm_loadu_si128(read + 1);
  const __m128i c = _mm_loadu_si128(read + 2);
  const __m128i d = _mm_loadu_si128(read + 3);
  _mm_stream_si128(write, a);
  _mm_stream_si128(write + 1, b);
  _mm_stream_si128(write + 2, c);
  _mm_stream_si128(write + 3, d);
}

}  // namespace

void copy_streaming(void* to, const void* from, size_t bytes) noexcept {
  auto* write = static_cast<std::byte*>(to);
  const auto* read = static_cast<const std::byte*>(from);
  const size_t past_line = reinterpret_cast<uintptr_t>(write) % kLineBytes;
  const size_t head = std::min(bytes, (kLineBytes - past_line) % kLineBytes);
  std::memcpy(write, read, head);
  size_t at = head;
  // The processor prefetches within each of the two pages.
  for (; at + 2 * kPageBytes <= bytes; at += 2 * kPageBytes) {
    for (size_t line = at; line < at + kPageBytes; line += kLineBytes) {
      copy_line(write + line, read + line);
      copy_line(write + line + kPageBytes, read + line + kPageBytes);
    }
  }
  for (; at + kLineBytes <= bytes; at += kLineBytes) copy_line(write + at, read + at);
  std::memcpy(write + at, read + at, bytes - at);
  _mm_sfence();
}

#else

void copy_streaming(void* to, const void* from, size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}

#endif

}  // namespace tdcopier
