// Copies two pages at a time, alternating between their cache lines, with the widest stores that
// the processor has.
#include "base/streaming_copy.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "base/cache_line.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_shared_cache_copies = 0;

#ifdef __SSE2__

// Some versions of clang want a second feature for registers of 64 bytes.
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 21
#define TDCOPIER_AVX512 "avx512f,evex512"
#else
#define TDCOPIER_AVX512 "avx512f"
#endif

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
  const auto copy_block = [&](bool is_last) __attribute__((always_inline)) {
    for (size_t line = at; line < at + kPageBytes; line += kLineBytes) {
      const std::byte* const a = read + line;
      const std::byte* const b = a + kPageBytes;
      if (!is_last) {
        _mm_prefetch(reinterpret_cast<const char*>(a + kBlockBytes), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(b + kBlockBytes), _MM_HINT_T1);
      }
      copy_line(write + line, a);
      copy_line(write + line + kPageBytes, b);
    }
    at += kBlockBytes;
  };
  while (at + 2 * kBlockBytes <= bytes) copy_block(/*is_last=*/false);
  if (at + kBlockBytes <= bytes) copy_block(/*is_last=*/true);
  for (; at + kLineBytes <= bytes; at += kLineBytes) copy_line(write + at, read + at);
  std::memcpy(write + at, read + at, bytes - at);
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

[[gnu::target(TDCOPIER_AVX512)]] void copy_by_64(void* to, const void* from,
                                                 size_t bytes) noexcept {
  copy_lines(to, from, bytes,
             [](std::byte* write, const std::byte* read) __attribute__((target(TDCOPIER_AVX512))) {
               _mm512_stream_si512(reinterpret_cast<__m512i*>(write), _mm512_loadu_si512(read));
             });
}

// Each line is demoted one block later, because demoting waits for the store. So the last block
// stays in the core's caches, and the one before `to` may leave them.
[[gnu::target(TDCOPIER_AVX512 ",cldemote")]] void copy_and_demote(void* to, const void* from,
                                                                  size_t bytes) noexcept {
  copy_lines(to, from, bytes,
             [](std::byte* write,
                const std::byte* read) __attribute__((target(TDCOPIER_AVX512 ",cldemote"))) {
               _mm512_store_si512(write, _mm512_loadu_si512(read));
               _cldemote(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(write) - kBlockBytes));
             });
}

bool has_32() {
  return __builtin_cpu_supports("avx");
}

bool has_64() {
  return __builtin_cpu_supports("avx512f");
}

bool can_demote() {
  constexpr unsigned kFeatures = 7;
  constexpr unsigned kCldemote = 1U << 25;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) != 0 && (c & kCldemote) != 0;
}

const StreamingCopy g_to_memory = has_64() ? copy_by_64 : has_32() ? copy_by_32 : copy_by_16;
const StreamingCopy g_best_to_shared_cache = has_64() && can_demote() ? copy_and_demote : nullptr;

#else

void copy_plain(void* to, const void* from, size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}

constexpr StreamingCopy g_to_memory = copy_plain;
constexpr StreamingCopy g_best_to_shared_cache = nullptr;

#endif

std::atomic<StreamingCopy> g_to_shared_cache = g_best_to_shared_cache;

}  // namespace

bool has_shared_cache_store() {
  return g_to_shared_cache != nullptr;
}

void set_shared_cache_store(bool always) {
  const bool is_missing = g_best_to_shared_cache == nullptr;
  g_to_shared_cache = always && is_missing ? g_to_memory : g_best_to_shared_cache;
}

void use_shared_cache_store(bool use) {
  g_to_shared_cache = use ? g_best_to_shared_cache : nullptr;
}

#ifdef __SSE2__
// Does nothing on a processor that cannot.
[[gnu::target("cldemote")]] void demote(const void* begin, size_t bytes) noexcept {
  const auto first = reinterpret_cast<uintptr_t>(begin) / kLineBytes * kLineBytes;
  const auto end = reinterpret_cast<uintptr_t>(begin) + bytes;
  for (uintptr_t line = first; line < end; line += kLineBytes) {
    _cldemote(reinterpret_cast<void*>(line));
  }
}
#else
void demote(const void* /*begin*/, size_t /*bytes*/) noexcept {}
#endif

void end_streaming() noexcept {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void copy_streaming(void* to, const void* from, size_t bytes, StoreTo store) noexcept {
  const StreamingCopy to_shared_cache = g_to_shared_cache;
  if (store != StoreTo::kSharedCache || !to_shared_cache) return g_to_memory(to, from, bytes);
  ++g_shared_cache_copies;
  to_shared_cache(to, from, bytes);
}

uint64_t shared_cache_copies() {
  return g_shared_cache_copies;
}

std::vector<StreamingCopy> streaming_copies() {
  std::vector<StreamingCopy> copies{g_to_memory};
#ifdef __SSE2__
  copies.push_back(copy_by_16);
  if (has_32()) copies.push_back(copy_by_32);
  if (has_64()) copies.push_back(copy_and_demote);  // where it cannot demote, it only copies
#endif
  return copies;
}

}  // namespace tdcopier
