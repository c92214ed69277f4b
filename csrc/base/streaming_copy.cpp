// Copies two pages at a time, alternating between their cache lines, with the widest stores that
// the processor has.
#include "base/streaming_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "base/cache_line.h"

namespace tdcopier {
namespace {

#ifdef __SSE2__

constexpr size_t kPageBytes = 4096;
constexpr size_t kBlockBytes = 2 * kPageBytes;

// Lets `copy_line(write, read)` copy each whole line of the target, and std::memcpy the rest: the
// memory would have to merge partial lines. Always inlined, so that each caller's instructions can
// be used for its lines.
template <typename CopyLine>
[[gnu::always_inline]] inline void copy_lines(void* to, const void* from, size_t bytes,
                                              const CopyLine& copy_line) {
  auto* write = static_cast<std::byte*>(to);
  const auto* read = static_cast<const std::byte*>(from);
  const size_t past_line = reinterpret_cast<uintptr_t>(write) % kLineBytes;
  const size_t head = std::min(bytes, (kLineBytes - past_line) % kLineBytes);
  std::memcpy(write, read, head);
  size_t at = head;
  // The processor prefetches within each of the two pages, but not from one page to the next.
  for (; at + kBlockBytes <= bytes; at += kBlockBytes) {
    for (size_t line = at; line < at + kPageBytes; line += kLineBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(read + line + kBlockBytes), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(read + line + kBlockBytes + kPageBytes),
                   _MM_HINT_T1);
      copy_line(write + line, read + line);
      copy_line(write + line + kPageBytes, read + line + kPageBytes);
    }
  }
  for (; at + kLineBytes <= bytes; at += kLineBytes) copy_line(write + at, read + at);
  std::memcpy(write + at, read + at, bytes - at);
  _mm_sfence();
}

void copy_by_16(void* to, const void* from, size_t bytes) noexcept {
  copy_lines(to, from, bytes, [](std::byte* write, const std::byte* read) {
    const auto* source = reinterpret_cast<const __m128i*>(read);
    auto* target = reinterpret_cast<__m128i*>(write);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  });
}

[[gnu::target("avx")]] void copy_by_32(void* to, const void* from, size_t bytes) noexcept {
  copy_lines(to, from, bytes,
             [](std::byte* write, const std::byte* read) __attribute__((target("avx"))) {
               const auto* source = reinterpret_cast<const __m256i*>(read);
               auto* target = reinterpret_cast<__m256i*>(write);
               const __m256i a = _mm256_loadu_si256(source);
               const __m256i b = _mm256_loadu_si256(source + 1);
               _mm256_stream_si256(target, a);
               _mm256_stream_si256(target + 1, b);
             });
}

[[gnu::target("avx512f")]] void copy_by_64(void* to, const void* from, size_t bytes) noexcept {
  copy_lines(to, from, bytes,
             [](std::byte* write, const std::byte* read) __attribute__((target("avx512f"))) {
               _mm512_stream_si512(reinterpret_cast<__m512i*>(write), _mm512_loadu_si512(read));
             });
}

// Each line is demoted one block later, because demoting waits for the store. So the last block
// stays in the core's caches, and the one before `to` may leave them.
[[gnu::target("avx512f,cldemote")]] void copy_and_demote(void* to, const void* from,
                                                         size_t bytes) noexcept {
  copy_lines(to, from, bytes,
             [](std::byte* write, const std::byte* read)
                 __attribute__((target("avx512f,cldemote"))) {
                   _mm512_store_si512(write, _mm512_loadu_si512(read));
                   _cldemote(write - kBlockBytes);
                 });
}

bool can_demote() {
  constexpr unsigned kFeatures = 7;
  constexpr unsigned kCldemote = 1U << 25;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) != 0 && (c & kCldemote) != 0;
}

#else

void copy_plain(void* to, const void* from, size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}

#endif

StreamingCopy best_copy(StoreTo store) {
  const std::vector<StreamingCopy> all = streaming_copies();
  for (const StreamingCopy& one : all) {
    if (one.store == store) return one;
  }
  return all.front();
}

}  // namespace

std::vector<StreamingCopy> streaming_copies() {
  std::vector<StreamingCopy> copies;
#ifdef __SSE2__
  const bool has_64 = __builtin_cpu_supports("avx512f");
  if (has_64) copies.push_back({StoreTo::kMemory, copy_by_64});
  if (__builtin_cpu_supports("avx")) copies.push_back({StoreTo::kMemory, copy_by_32});
  copies.push_back({StoreTo::kMemory, copy_by_16});
  if (has_64 && can_demote()) {
    copies.push_back({StoreTo::kSharedCache, copy_and_demote});
  }
#else
  copies.push_back({StoreTo::kMemory, copy_plain});
#endif
  return copies;
}

void copy_streaming(void* to, const void* from, size_t bytes, StoreTo store) noexcept {
  static const StreamingCopy to_memory = best_copy(StoreTo::kMemory);
  static const StreamingCopy to_shared_cache = best_copy(StoreTo::kSharedCache);
  (store == StoreTo::kMemory ? to_memory : to_shared_cache).copy(to, from, bytes);
}

}  // namespace tdcopier
