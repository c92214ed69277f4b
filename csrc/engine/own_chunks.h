// Remembers which storages are chunks of the engine's own, and where slots lie in them: what lies
// between slots is padding, which whoever fills a chunk again may write.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "engine/leaf.h"

namespace tdcopier {

// The bytes of one slot, from the chunk's first on.
struct SlotRange {
  uint64_t begin;
  uint64_t end;
};

// The slots of one chunk.
class ChunkSlots {
 public:
  ChunkSlots(const std::byte* begin, RecycledVector<SlotRange> slots)
      : begin_(begin), slots_(std::move(slots)) {}

  const std::byte* begin() const { return begin_; }
  // Are the bytes [from, to) just what lies between a slot and the next? Only then are they
  // nobody's: whoever has made views of the chunk by other bounds has put something between slots.
  // Ask for ascending addresses: `cursor` is 0 at first.
  bool is_padding(const std::byte* from, const std::byte* to, size_t& cursor) const;

 private:
  const std::byte* begin_;  // where its first slot begins
  const RecycledVector<SlotRange> slots_;
};

// Thread: any. Lifetime: an entry goes some time after its storage. No storage is kept alive.
// `shift` is where its first slot begins, in bytes.
void remember_chunk(const c10::Storage& storage, uint64_t shift, const PackPlan& plan,
                    const ChunkPlan& chunk, const LeafTable& leaves);

// Null unless it is a chunk that is remembered, with its memory as it was. Requires: the storage is
// alive.
std::shared_ptr<const ChunkSlots> slots_of(const c10::StorageImpl* storage);

}  // namespace tdcopier
