// Copies bytes that a device reads next, with stores that keep them out of the core's own caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tdcopier {

// Where the bytes go. A device reads the first two faster than the caches of a core.
enum class StoreTo {
  kMemory,       // past all caches
  kSharedCache,  // to the cache that all cores share; slower, but leaves memory to the device
  kOwnCache,     // where std::memcpy leaves them, for the host; except very many, as kMemory
};

// Returns whether copy_streaming() stores to the shared cache, because the processor can. Thread:
// any.
bool has_shared_cache_store();
// For tests on processors that cannot: `always` makes copy_streaming() act as if it stored there.
// Thread: any.
void set_shared_cache_store(bool always);
// Lets copy_streaming() store there if the processor can, or never, for comparisons. Thread: any.
void use_shared_cache_store(bool use);
// Returns how many copies have gone there, for tests. Thread: any.
uint64_t shared_cache_copies();

// Like std::memcpy, but leaves the bytes where `store` says, and most of the other data in the
// core's caches. A processor that cannot do so stores to memory, or like std::memcpy.
//
// Thread: call end_streaming() before another thread, or a device, is told of the bytes.
void copy_streaming(void* to, const void* from, size_t bytes,
                    StoreTo store = StoreTo::kMemory) noexcept;

// Ends a series of copies: a release store after the call publishes their bytes.
void end_streaming() noexcept;

// Moves bytes that the core has stored from its own caches to the one that all cores share, if the
// processor can: a device reads them faster there. Rows of a few bytes are stored so, which
// copy_streaming() cannot do: 13 leaves of 4096 rows of 64 bytes arrive in 244 us instead of 298, 4
// of 4096 rows of 256 bytes in 280 instead of 344 (H200).
void demote(const void* begin, size_t bytes) noexcept;

using StreamingCopy = void (*)(void* to, const void* from, size_t bytes) noexcept;

// Returns all ways to copy like that which run on this processor, for tests. The best one to memory
// comes first.
std::vector<StreamingCopy> streaming_copies();

}  // namespace tdcopier
