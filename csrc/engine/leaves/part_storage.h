// Gives each leaf of a chunk in host memory a storage of its own.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/block_stack.h"

namespace tdcopier {

// The bytes of one leaf, in a chunk that it keeps alive. It is as long as the leaf, so the leaf
// alone is saved and pickled, and growing it moves it to memory of its own.
//
// Its memory has the context of the chunk's memory: by that, torch's pinned allocator finds the
// block that a transfer uses. A device's allocator would need the block's address instead, so
// leaves on a device share the storage of their chunk. The context of pageable memory is its
// address; a part has another one, or torch would take the first part for an allocation of its own,
// and keep its address without the part when it makes a lazy clone.
class PartStorage final : public c10::StorageImpl {
 public:
  // Returns a storage over the bytes [begin, begin + bytes) of the chunk.
  static c10::Storage make(const c10::Storage& chunk, uint64_t begin, uint64_t bytes) {
    return c10::Storage(c10::make_intrusive<PartStorage>(chunk, begin, bytes));
  }
  PartStorage(const c10::Storage& chunk, uint64_t begin, uint64_t bytes)
      : StorageImpl(use_byte_size_t(), static_cast<int64_t>(bytes),
                    c10::DataPtr(static_cast<std::byte*>(chunk.mutable_data()) + begin,
                                 context_of(chunk), &free_nothing, chunk.device()),
                    chunk.allocator(), /*resizable=*/true),
        chunk_(chunk) {}

  // Returns what tells this allocation from others: equal for all parts of a chunk that were not
  // resized.
  static const void* allocation_of(const c10::StorageImpl& storage) {
    const c10::DataPtr& memory = storage.data_ptr();
    return memory.get_deleter() == &free_nothing ? memory.get_context() : &storage;
  }

  // Returns the chunk that a storage is a part of; none if it is no part, or has been resized.
  static c10::Storage chunk_of(const c10::StorageImpl& storage) {
    if (storage.data_ptr().get_deleter() != &free_nothing) return {};
    return static_cast<const PartStorage&>(storage).chunk_;
  }

  void release_resources() override {
    StorageImpl::release_resources();
    chunk_ = {};
  }

  static void* operator new(size_t) { return Blocks::take(); }
  static void operator delete(void* block) noexcept { Blocks::give(block); }

 private:
  static void free_nothing(void* /*context*/) {}
  static void* context_of(const c10::Storage& chunk) {
    void* const context = chunk.data_ptr().get_context();
    return context != chunk.data() ? context : chunk.unsafeGetStorageImpl();
  }

  static constexpr size_t kMostKept = 4096;  // under 1 MiB
  using Blocks = BlockStack<sizeof(c10::StorageImpl) + sizeof(c10::Storage), kMostKept>;

  c10::Storage chunk_;  // keeps the memory alive
};

}  // namespace tdcopier
