// Arrays whose memory is reused by the next copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tdcopier {

// Take and give back blocks of a power of two bytes, from 1 KiB to 1 MiB. A few free blocks of each
// size are kept. Asked for this much, the C library would first consolidate the hundreds of small
// blocks that the tensors of the previous batch left, which takes longer than the walk over a
// batch.
//
// Thread: any. Larger blocks go to the C library.
void* allocate_block(size_t bytes);
void free_block(void* block, size_t bytes) noexcept;  // `bytes` as requested

// Returns the number of blocks that came from the C library, because none of theirs was free or
// they are larger than all that are kept. For tests.
uint64_t blocks_made();

template <typename T>
struct RecyclingAllocator {
  using value_type = T;

  RecyclingAllocator() = default;
  template <typename U>
  RecyclingAllocator(const RecyclingAllocator<U>&) noexcept {}

  T* allocate(size_t count) { return static_cast<T*>(allocate_block(count * sizeof(T))); }
  void deallocate(T* block, size_t count) noexcept { free_block(block, count * sizeof(T)); }

  friend bool operator==(const RecyclingAllocator&, const RecyclingAllocator&) { return true; }
};

template <typename T>
using RecycledVector = std::vector<T, RecyclingAllocator<T>>;

}  // namespace tdcopier
